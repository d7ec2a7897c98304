"""Groups of requests to single engines in real Ray actors: who answers, what a failure says, and what a cancel does."""

import asyncio
import os
import signal
import sys
import time

import fake_generation
import pytest
import ray
from fake_engine import FakeEngine
from fake_generation import Weights, generation, prompts

from nemo_rl_mcore.generation.engine import EngineFailedError, GenerationCancelledError

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
assert fake_generation  # registers its own


class WhoAnswers(FakeEngine):
    """Says in the log-probability of each token which process drew it, and raises for prompts of 7 tokens."""

    async def generate(self, requests, sampling, version=None, ticket=""):
        if len(requests[0].prompt) == 7:
            raise ValueError("seven is too many")
        answers = await super().generate(requests, sampling, version, ticket)
        for answer in answers:
            answer.logprobs[:] = [-float(os.getpid())] * len(answer.tokens)
        return answers


class StandsStill(FakeEngine):
    async def generate(self, requests, sampling, version=None, ticket=""):
        time.sleep(60)


def asked(coroutine):
    return asyncio.run(coroutine)


def test_groups_are_answered_as_the_whole_batch_is_whoever_answers_them(cluster):
    data = prompts(3, 5, 1, 4)
    with generation(cluster, Weights(), engine=WhoAnswers, settings=0.02) as engines:
        engines.update_weights(0)
        whole = engines.generate(data, step=2)

        async def groups():
            rows = [data.select_indices([row]) for row in range(4)]
            return await asyncio.gather(
                *(engines.respond(row, step=2, ticket=f"{n}") for n, row in enumerate(rows))
            )

        apart = asked(groups())
        assert [one["tokens"][0].tolist() for one in apart] == whole["tokens"].tolist()
        assert {one["weight_versions"][0, 0].item() for one in apart} == {0}
        assert len({one["logprobs"][0, 0].item() for one in apart}) == 2, "two groups for each of two engines"


def test_a_group_goes_on_while_the_weights_change(cluster):
    source = Weights()
    with generation(cluster, source, settings=0.05) as engines:
        engines.update_weights(0)

        async def across():
            group = asyncio.create_task(engines.respond(prompts(3), step=1, ticket="kept"))
            await asyncio.sleep(0.12)
            await asyncio.to_thread(engines.update_weights, 1)
            return await group

        versions = [one for one in asked(across())["weight_versions"][0].tolist() if one >= 0]
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}


def test_what_an_engine_raises_names_it_and_it_answers_the_next_group(cluster):
    with generation(cluster, Weights(), engine=WhoAnswers, engines=1) as engines:
        engines.update_weights(0)
        with pytest.raises(
            EngineFailedError, match=r"fake engine 0 \(host .*\): ValueError: seven is too many"
        ):
            asked(engines.respond(prompts(7), step=1, ticket="bad"))
        assert asked(engines.respond(prompts(6), step=1, ticket="good"))["lengths"].shape == (1,)


def test_a_group_is_given_up(cluster):
    with generation(cluster, Weights(), settings=0.2) as engines:
        engines.update_weights(0)

        async def cancelled():
            group = asyncio.create_task(engines.respond(prompts(3), step=1, ticket="dropped"))
            await asyncio.sleep(0.3)
            await engines.cancel("dropped")
            await engines.cancel("nobody asked for this")
            await group

        with pytest.raises(GenerationCancelledError):
            asked(cancelled())


def test_an_engine_that_dies_or_stands_still_is_named_with_its_deadline(cluster):
    with generation(cluster, Weights(), settings=0.5, engines=1) as engines:
        engines.update_weights(0)

        async def dies():
            group = asyncio.create_task(engines.respond(prompts(3), step=1, ticket="lost"))
            await asyncio.sleep(0.3)
            os.kill(engines._group.identities[0].pid, signal.SIGKILL)
            await group

        with pytest.raises(EngineFailedError, match=r"fake engine 0 \(host .*died"):
            asked(dies())
    with generation(cluster, Weights(), engine=StandsStill, engines=1, call_timeout_s=3.0) as engines:
        engines.update_weights(0)
        with pytest.raises(
            EngineFailedError,
            match=r"fake engine 0 .*made no progress for 3 s \(policy.generation.fake.call_timeout_s\)",
        ):
            asked(engines.respond(prompts(3), step=1, ticket="late"))
