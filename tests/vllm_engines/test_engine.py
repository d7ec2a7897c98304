"""vLLM itself, in a process of its own: what it answers with, after which weights, and where it listens."""

import asyncio
import json
import os
from pathlib import Path

import engine_process as tiny
import pytest
from chat_templates import byte_tokenizer
from engine_contract import keeps_to_the_contract
from listening import listening_addresses

from nemo_rl_mcore.data.tokenizer import StopConditions
from nemo_rl_mcore.engine.engine import Request, Response, Sampling

LOGPROBS = 1e-4
DENSE_FAMILIES = ["llama", "llama_scaled_rotary", "qwen2", "qwen3"]


def errors_after_refits(folder, family, tied):
    """For each refit: the distance of the log-probabilities from its weights, and from the other refit's."""
    from nemo_rl_mcore.engine.vllm.engine import VllmEngine

    tiny.model_folder(folder, family, tied=tied)
    engine = VllmEngine(tiny.settings(folder))
    asked, sampling = tiny.requests(), Sampling(16, temperature=0.7)
    models = [tiny.transformers_model(folder, seed) for seed in (0, 1)]
    found = []
    for version, model in enumerate(models):
        tiny.refit(engine, model, version)
        answered = engine.generate(asked, sampling, version)
        found.append([tiny.largest_error(models[i], asked, answered, 0.7) for i in (version, 1 - version)])
    engine.shutdown()
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_after_a_refit_the_logprobs_are_those_of_the_new_weights(engine_process, tmp_path, family, tied):
    [refits] = engine_process.run(errors_after_refits, tmp_path / "model", family, tied)
    for own, other in refits:
        assert own < LOGPROBS
        assert other > 0.1


def errors_under_filters(folder, filters):
    """The distance of the log-probabilities from those of the filtered distribution, and of the whole one."""
    from nemo_rl_mcore.engine.vllm.engine import VllmEngine

    tiny.model_folder(folder)
    engine, model, asked = (
        VllmEngine(tiny.settings(folder)),
        tiny.transformers_model(folder, 0),
        tiny.requests(),
    )
    tiny.refit(engine, model, 0)
    answered = engine.generate(asked, Sampling(16, temperature=0.7, **filters), 0)
    engine.shutdown()
    return [tiny.largest_error(model, asked, answered, 0.7, **given) for given in (filters, {})]


def test_logprobs_are_of_the_filtered_distribution_as_in_training(engine_process, tmp_path):
    [errors] = engine_process.run(errors_under_filters, tmp_path / "model", {"top_k": 12, "top_p": 0.9})
    assert errors[0] < LOGPROBS
    assert errors[1] > 0.1


OF_ALL = ("k", "<|pad|>")


def endings_of_bytes(folder):
    """Tokens and whether they ended, and the end by our own stop conditions, of tokens that are parts of characters.

    Of all requests, and of those without strings of their own, which end by those of all.
    """
    from nemo_rl_mcore.engine.vllm.engine import VllmEngine

    tiny.model_folder(folder)
    tokenizer = byte_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": tokenizer.vocab_size}))
    engine = VllmEngine(tiny.settings(folder, tokenizer=str(folder)))
    tiny.refit(engine, tiny.transformers_model(folder, 0), 0, bucket_bytes=100_000)
    strings = [
        ("the", "er"),
        (),
        ("a", "o", "gh"),
        ("é", "e", "i"),
        ("0", "5", "9", "="),
        ("<|im_end|>", "u"),
    ]
    asked = [Request([5, 9, 30], seed, strings[seed % len(strings)]) for seed in range(96)]
    whole = engine.generate([Request(one.prompt, one.seed) for one in asked], Sampling(40), 0)
    stopped = engine.generate(asked, Sampling(40, stop_strings=OF_ALL), 0)
    engine.shutdown()
    found = []
    for request, response, unstopped in zip(asked, stopped, whole, strict=True):
        stops = StopConditions(strings=(*OF_ALL, *request.stop_strings), tokenizer=tokenizer)
        end = next((length for length in range(1, 41) if stops.met_by(unstopped.tokens[:length])), None)
        found.append((response.tokens, response.finished, unstopped.tokens[:end], end is not None))
    return found, [one for request, one in zip(asked, found, strict=True) if not request.stop_strings]


def test_stop_strings_of_requests_end_them_where_the_embedded_engine_does(engine_process, tmp_path):
    [(found, by_those_of_all)] = engine_process.run(endings_of_bytes, tmp_path / "model")
    assert [(tokens, finished) for tokens, finished, *_ in found] == [(ids, end) for *_, ids, end in found]
    assert 10 < sum(finished for _, finished, *_ in found) < 86
    assert {finished for _, finished, *_ in by_those_of_all} == {True, False}


def in_flight(folder):
    """Requests that a refit overtakes, and others around it."""
    from nemo_rl_mcore.engine.vllm.engine import AsyncVllmEngine

    tiny.model_folder(folder)
    models = [tiny.transformers_model(folder, seed) for seed in (0, 1)]

    async def scenario():
        engine = AsyncVllmEngine(tiny.settings(folder))
        early = asyncio.create_task(engine.generate(tiny.requests([5]), Sampling(4)))
        await asyncio.sleep(0.1)
        waited = not early.done()
        await tiny.refit_soon(engine, models[0], 0)
        before = await engine.generate(tiny.requests(), Sampling(16), 0)
        overtaken = asyncio.create_task(engine.generate(tiny.requests([5, 9, 2, 7]), Sampling(200)))
        await asyncio.sleep(0.1)
        running = not overtaken.done()
        await tiny.refit_soon(engine, models[1], 1)
        still_running = not overtaken.done()
        responses = await overtaken
        after = await engine.generate(tiny.requests(), Sampling(16), 1)
        found = {
            "waited for weights": waited and len((await early)[0].tokens) == 4,
            "overtaken": [running, still_running],
            "lengths": [len(response.tokens) for response in responses],
            "versions": [(response.versions[0], response.versions[-1]) for response in responses],
            "before": tiny.largest_error(models[0], tiny.requests(), before, 1.0),
            "after": tiny.largest_error(models[1], tiny.requests(), after, 1.0),
            # Whose the last tokens are: with the key-value cache recomputed they are of the new weights alone.
            "tail": tail_error(models[1], tiny.requests([5, 9, 2, 7]), responses),
        }
        await engine.shutdown()
        return found

    return asyncio.run(scenario())


def tail_error(model, asked, answered, tokens=20):
    tails = [
        (
            Request([*request.prompt, *response.tokens[:-tokens]], 0),
            Response(response.tokens[-tokens:], response.logprobs[-tokens:], False, [], 0),
        )
        for request, response in zip(asked, answered, strict=True)
    ]
    return tiny.largest_error(model, [tail[0] for tail in tails], [tail[1] for tail in tails], 1.0)


def test_weights_change_while_requests_are_in_flight(engine_process, tmp_path: Path):
    [found] = engine_process.run(in_flight, tmp_path / "model")
    assert found["waited for weights"]
    assert found["overtaken"] == [True, True]
    assert found["lengths"] == [200] * 4
    assert found["versions"] == [(0, 1)] * 4
    assert found["before"] < LOGPROBS
    assert found["after"] < LOGPROBS
    assert found["tail"] < LOGPROBS


def overtaken_by_equal_weights(folder):
    """Answers to the same requests while nothing happens, and while the same weights arrive again and again."""
    from nemo_rl_mcore.engine.vllm.engine import AsyncVllmEngine

    tiny.model_folder(folder)
    model, asked, sampling = tiny.transformers_model(folder, 0), tiny.requests([5, 9, 2, 7]), Sampling(200)

    async def scenario():
        engine = AsyncVllmEngine(tiny.settings(folder))
        await tiny.refit_soon(engine, model, 0)
        quiet = await engine.generate(asked, sampling)
        answers = asyncio.create_task(engine.generate(asked, sampling))
        version = 0
        while not answers.done():
            await asyncio.sleep(0.1)
            version += 1
            await tiny.refit_soon(engine, model, version)
        await engine.shutdown()
        return quiet, await answers, tiny.largest_error(model, asked, await answers, 1.0)

    return asyncio.run(scenario())


def test_a_refit_to_equal_weights_changes_no_token_that_is_drawn_meanwhile(engine_process, tmp_path):
    [(quiet, overtaken, error)] = engine_process.run(overtaken_by_equal_weights, tmp_path / "model")
    assert all(len({*response.versions}) > 1 for response in overtaken)
    assert [response.tokens for response in overtaken] == [response.tokens for response in quiet]
    assert error < LOGPROBS


def keeps(folder, asynchronous):
    from nemo_rl_mcore.engine.vllm.engine import AsyncVllmEngine, VllmEngine

    tiny.model_folder(folder)
    old, new = (tiny.weights(tiny.transformers_model(folder, seed)) for seed in (0, 1))

    async def in_a_loop():
        engine = (AsyncVllmEngine if asynchronous else VllmEngine)(tiny.settings(folder))
        await keeps_to_the_contract(
            engine, old, new, tiny.requests([3, 40, 5]), overlaps=asynchronous, sleeps=False
        )

    asyncio.run(in_a_loop())


@pytest.mark.parametrize("asynchronous", [False, True], ids=["batches", "requests"])
def test_vllm_keeps_to_the_contract(engine_process, tmp_path, asynchronous):
    engine_process.run(keeps, tmp_path / "model", asynchronous)


def listening_of_an_engine(folder, ranks, asynchronous):
    """The addresses at which this process and those below it listen, once the engine has answered."""
    from nemo_rl_mcore.engine.vllm.engine import AsyncVllmEngine, VllmEngine

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # as in `cluster.LOCAL_NETWORK`
    settings = tiny.settings(tiny.model_folder(folder), tensor_parallel_size=ranks)
    before = listening_addresses()

    async def in_a_loop():
        engine = AsyncVllmEngine(settings)
        await engine.begin_refit(1)
        found = listening_addresses()
        await engine.shutdown()
        return found

    if asynchronous:
        return before, asyncio.run(in_a_loop())
    engine = VllmEngine(settings)
    engine.begin_refit(1)
    found = listening_addresses()
    engine.shutdown()
    return before, found


@pytest.mark.parametrize(
    ("ranks", "asynchronous"), [(1, False), (1, True), (2, False)], ids=["one-process", "async", "tp2"]
)
def test_an_engine_listens_on_loopback_alone(engine_process, tmp_path, ranks, asynchronous):
    [(before, found)] = engine_process.run(listening_of_an_engine, tmp_path / "model", ranks, asynchronous)
    assert before == [], "what listens is the engine's"
    assert set(found) <= {"127.0.0.1"}
