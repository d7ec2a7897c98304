"""vLLM itself, in a process of its own: what it answers with, after which weights."""

from pathlib import Path

import pytest

LOGPROBS = 1e-4
DENSE_FAMILIES = ["llama", "llama_scaled_rotary", "qwen2", "qwen3"]


def errors_after_refits(folder, family, tied):
    """For each refit: the distance of the log-probabilities from its weights, and from the other refit's."""
    import engine_process as tiny

    from nemo_rl_mcore.engine.engine import Sampling
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


def refused_versions(folder):
    import engine_process as tiny

    from nemo_rl_mcore.engine.engine import Sampling, WrongWeightsError
    from nemo_rl_mcore.engine.vllm.engine import VllmEngine
    from nemo_rl_mcore.rank.refit.digests import digests

    tiny.model_folder(folder)
    engine = VllmEngine(tiny.settings(folder))
    model, tensors = tiny.transformers_model(folder, 0), tiny.weights(tiny.transformers_model(folder, 0))
    asked, sampling = tiny.requests([3]), Sampling(4)
    refusals = {}

    def attempt(name, call, *arguments):
        try:
            call(*arguments)
            refusals[name] = "accepted"
        except (WrongWeightsError, RuntimeError, ValueError) as error:
            refusals[name] = f"{type(error).__name__}: {error}"

    attempt("before the first refit", engine.generate, asked, sampling, 0)
    tiny.refit(engine, model, 0)
    attempt("another version", engine.generate, asked, sampling, 1)
    attempt("the same version again", engine.begin_refit, 0)
    attempt("after a refusal of the same version", engine.generate, asked, sampling, 0)

    # A refit that breaks off in the middle.
    engine.begin_refit(1)
    engine.load_bucket(next(iter(tiny.messages(tensors))))
    attempt("half applied, new version", engine.generate, asked, sampling, 1)
    attempt("half applied, old version", engine.generate, asked, sampling, 0)

    # One that loses a tensor on the way, and one whose sender never had it.
    for name, sent in (("a lost tensor", tensors), ("a missing weight", tensors[:-1])):
        engine.begin_refit(1)
        for message in tiny.messages(tensors[:-1]):
            engine.load_bucket(message)
        attempt(name, engine.finish_refit, 1, digests(sent))
        attempt(f"{name}, then", engine.generate, asked, sampling, 1)

    engine.begin_refit(1)
    attempt(
        "an unknown tensor",
        engine.load_bucket,
        next(iter(tiny.messages([("model.nonsense", tensors[0][1])]))),
    )
    other = tiny.transformers_model(folder, 1)
    tiny.refit(engine, other, 2)
    error = tiny.largest_error(other, asked, engine.generate(asked, sampling, 2), 1.0)
    engine.shutdown()
    return refusals, error


def test_an_engine_answers_only_with_whole_weights_of_the_version_asked_for(engine_process, tmp_path):
    [(refusals, error_afterwards)] = engine_process.run(refused_versions, tmp_path / "model")
    assert refusals.pop("after a refusal of the same version") == "accepted"
    for name in ("before the first refit", "half applied, new version", "half applied, old version"):
        assert "the engine's are of no version" in refusals.pop(name)
    for name in ("a lost tensor, then", "a missing weight, then"):
        assert "asked for weights of version 1, and the engine's are of no version" in refusals.pop(name)
    assert "asked for weights of version 1, and the engine's are of 0" in refusals.pop("another version")
    assert "version 0 are not newer than those of 0" in refusals.pop("the same version again")
    assert "of 21 tensors 1 sent and not found: lm_head.weight" in refusals.pop("a lost tensor")
    assert "of 20 tensors 1 without new weights: lm_head.weight" in refusals.pop("a missing weight")
    assert "nonsense" in refusals.pop("an unknown tensor")
    assert not refusals
    assert error_afterwards < LOGPROBS


def sampled(folder):
    """Answers to the same requests: twice, in another order, one by one, with other seeds."""
    import engine_process as tiny

    from nemo_rl_mcore.engine.engine import Request, Sampling
    from nemo_rl_mcore.engine.vllm.engine import VllmEngine

    tiny.model_folder(folder)
    engine = VllmEngine(tiny.settings(folder))
    tiny.refit(engine, tiny.transformers_model(folder, 0), 0)
    asked, sampling = tiny.requests([5, 9, 5, 30, 2]), Sampling(12)

    def tokens(asked):
        return [response.tokens for response in engine.generate(asked, sampling, 0)]

    reseeded = [Request(request.prompt, request.seed + 1000) for request in asked]
    found = (
        tokens(asked), tokens(asked), tokens(asked[::-1])[::-1], [tokens([one])[0] for one in asked], tokens(reseeded)
    )  # fmt: skip
    engine.shutdown()
    return found


def test_the_tokens_of_a_request_depend_on_its_seed_alone(engine_process, tmp_path):
    [(first, *same, reseeded)] = engine_process.run(sampled, tmp_path / "model")
    assert same == [first] * 3
    assert all(one != other for one, other in zip(first, reseeded, strict=True))


def endings(folder, stop_ids, stop_strings, of_requests=False):
    """of_requests: the stop strings are those of each request, else of the sampling."""
    from dataclasses import replace

    import engine_process as tiny

    from nemo_rl_mcore.data.tokenizer import CHAR_VOCABULARY, load_tokenizer
    from nemo_rl_mcore.engine.engine import Request, Sampling
    from nemo_rl_mcore.engine.vllm.engine import VllmEngine

    tiny.model_folder(folder)
    tokenizer = load_tokenizer("char")
    tokenizer.save_as_hugging_face(folder)
    engine = VllmEngine(tiny.settings(folder, tokenizer=str(folder)))
    tiny.refit(engine, tiny.transformers_model(folder, 0), 0)
    asked = [Request(tokenizer.encode("12+3="), seed) for seed in range(24)]
    if of_requests:
        own = [replace(request, stop_strings=stop_strings) for request in asked]
        stopped = engine.generate(own, Sampling(10, stop_ids=stop_ids), 0)
    else:
        stopped = engine.generate(asked, Sampling(10, stop_ids=stop_ids, stop_strings=stop_strings), 0)
    whole = engine.generate(asked, Sampling(10), 0)
    engine.shutdown()
    texts = ["".join(CHAR_VOCABULARY[token] for token in response.tokens) for response in stopped]
    ends = [(r.tokens, r.finished, text) for r, text in zip(stopped, texts, strict=True)]
    return ends, [response.tokens for response in whole]


def test_a_stop_id_ends_a_response_and_belongs_to_it(engine_process, tmp_path):
    [(stopped, whole)] = engine_process.run(endings, tmp_path / "model", (3, 7, 11), ())
    assert {finished for _, finished, _ in stopped} == {True, False}
    for (tokens, finished, _), unstopped in zip(stopped, whole, strict=True):
        ends = [place for place, token in enumerate(unstopped) if token in (3, 7, 11)]
        assert finished == bool(ends)
        assert tokens == (unstopped[: ends[0] + 1] if ends else unstopped)


@pytest.mark.parametrize("of_requests", [False, True], ids=["sampling", "requests"])
def test_a_stop_string_ends_a_response_and_belongs_to_it(engine_process, tmp_path, of_requests):
    [(stopped, whole)] = engine_process.run(endings, tmp_path / "model", (), ("1", "a", "#"), of_requests)
    assert {finished for _, finished, _ in stopped} == {True, False}
    for (tokens, finished, text), unstopped in zip(stopped, whole, strict=True):
        assert finished == any(string in text for string in "1a#")
        assert not any(string in text[:-1] for string in "1a#")
        assert tokens == unstopped[: len(tokens)]
        assert finished or len(tokens) == 10


def endings_of_bytes(folder):
    """Tokens and whether they ended, and the end by our own stop conditions, of tokens that are parts of characters."""
    import json

    import engine_process as tiny
    from chat_templates import byte_tokenizer

    from nemo_rl_mcore.data.tokenizer import StopConditions
    from nemo_rl_mcore.engine.engine import Request, Sampling
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


def greedy_answers(folder):
    import engine_process as tiny
    import torch

    from nemo_rl_mcore.engine.engine import Sampling
    from nemo_rl_mcore.engine.vllm.engine import VllmEngine

    tiny.model_folder(folder, "qwen3")
    engine = VllmEngine(tiny.settings(folder))
    model = tiny.transformers_model(folder, 0)
    tiny.refit(engine, model, 0)
    asked = tiny.requests()
    found = [response.tokens for response in engine.generate(asked, Sampling(16, 0.7, greedy=True), 0)]
    engine.shutdown()
    expected = [generate(model, torch.tensor([request.prompt])) for request in asked]
    return found, expected


def generate(model, ids):
    # Left to itself, transformers takes tokens that are the padding's for padding.
    every = ids.new_ones(ids.shape)
    found = model.generate(ids, attention_mask=every, max_new_tokens=16, do_sample=False, pad_token_id=0)
    return found[0].tolist()[ids.shape[1] :]


def test_greedy_tokens_are_those_of_transformers(engine_process, tmp_path):
    [(found, expected)] = engine_process.run(greedy_answers, tmp_path / "model")
    assert found == expected


def in_flight(folder):
    """Requests that a refit overtakes, and others around it."""
    import asyncio

    import engine_process as tiny

    from nemo_rl_mcore.engine.engine import Sampling
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
    import engine_process as tiny

    from nemo_rl_mcore.engine.engine import Request, Response

    tails = [
        (
            Request([*request.prompt, *response.tokens[:-tokens]], 0),
            Response.of(response.tokens[-tokens:], response.logprobs[-tokens:], [], finished=False),
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
    import asyncio

    import engine_process as tiny

    from nemo_rl_mcore.engine.engine import Sampling
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
