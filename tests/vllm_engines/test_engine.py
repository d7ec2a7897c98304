"""vLLM itself, in a process of its own: what it answers with, after which weights."""

import asyncio
import json
from pathlib import Path

import engine_process as tiny
import pytest
from chat_templates import byte_tokenizer

from nemo_rl_mcore.data.tokenizer import CHAR_VOCABULARY, StopConditions, load_tokenizer
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


def endings(folder, stop_strings):
    from nemo_rl_mcore.engine.vllm.engine import VllmEngine

    tiny.model_folder(folder)
    tokenizer = load_tokenizer("char")
    tokenizer.save_as_hugging_face(folder)
    engine = VllmEngine(tiny.settings(folder, tokenizer=str(folder)))
    tiny.refit(engine, tiny.transformers_model(folder, 0), 0)
    asked = [Request(tokenizer.encode("12+3="), seed) for seed in range(24)]
    stopped = engine.generate(asked, Sampling(10, stop_strings=stop_strings), 0)
    whole = engine.generate(asked, Sampling(10), 0)
    engine.shutdown()
    texts = ["".join(CHAR_VOCABULARY[token] for token in response.tokens) for response in stopped]
    ends = [(r.tokens, r.finished, text) for r, text in zip(stopped, texts, strict=True)]
    return ends, [response.tokens for response in whole]


def test_a_stop_string_ends_a_response_and_belongs_to_it(engine_process, tmp_path):
    [(stopped, whole)] = engine_process.run(endings, tmp_path / "model", ("1", "a", "#"))
    assert {finished for _, finished, _ in stopped} == {True, False}
    for (tokens, finished, text), unstopped in zip(stopped, whole, strict=True):
        assert finished == any(string in text for string in "1a#")
        assert not any(string in text[:-1] for string in "1a#")
        assert tokens == unstopped[: len(tokens)]
        assert finished or len(tokens) == 10


def endings_of_bytes(folder):
    """Tokens and whether they ended, and the end by our own stop conditions, of tokens that are parts of characters."""
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
    stopped = engine.generate(asked, Sampling(40), 0)
    engine.shutdown()
    found = []
    for request, response, unstopped in zip(asked, stopped, whole, strict=True):
        stops = StopConditions(strings=request.stop_strings, tokenizer=tokenizer)
        lengths = range(1, 41) if request.stop_strings else ()
        end = next((length for length in lengths if stops.met_by(unstopped.tokens[:length])), None)
        found.append((response.tokens, response.finished, unstopped.tokens[:end], end is not None))
    return found


def test_stop_strings_of_requests_end_them_where_the_embedded_engine_does(engine_process, tmp_path):
    [found] = engine_process.run(endings_of_bytes, tmp_path / "model")
    assert [(tokens, finished) for tokens, finished, *_ in found] == [(ids, end) for *_, ids, end in found]
    assert 10 < sum(finished for _, finished, *_ in found) < 86


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
