"""Groups of requests to single engines in real Ray actors: who answers, what a failure says, and what a cancel does."""

import asyncio
import os
import sys
import time
from pathlib import Path

import fake_generation
import pytest
import ray
from fake_engine import FakeEngine
from fake_generation import Weights, engine_of, generation, kill, prompts, until

from nemo_rl_mcore.driver.actors.failures import WorkerError
from nemo_rl_mcore.engine.engine import EngineDiedError, EngineFailedError

pytestmark = pytest.mark.stage("processes")

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
        with pytest.raises(EngineFailedError, match=r"fake engine 0 \(host .*\): ValueError: seven"):
            asked(engines.respond(prompts(7), step=1, ticket="bad"))
        assert asked(engines.respond(prompts(6), step=1, ticket="good"))["lengths"].shape == (1,)


class TellsOfCancels(FakeEngine):
    cancelled = ()

    async def cancel(self, ticket):
        self.cancelled = (*self.cancelled, ticket)

    async def told(self):
        return self.cancelled


def test_a_task_that_is_cancelled_gives_its_group_up_at_the_engine(cluster):
    with generation(cluster, Weights(), engine=TellsOfCancels, settings=0.2, engines=1) as engines:
        engines.update_weights(0)

        async def gives_up():
            async with asyncio.timeout(0.3):
                await engines.respond(prompts(3), step=1, ticket="late")

        with pytest.raises(TimeoutError):
            asked(gives_up())
        engine = engine_of(engines, 0).process.handle
        told = until(
            lambda: ray.get(engine.told.remote(), timeout=5)
        )  # nobody waits for what it does with it
        assert told == ("late, call 1",), "an engine knows a call by its ticket and its number"


@pytest.mark.smoke
def test_what_a_dead_engine_was_asked_is_answered_by_another_with_the_same_noise(cluster):
    """Both are asked by then; the one that restarts gets weights beside the other's answers."""
    data = prompts(3, 5)
    with generation(cluster, Weights(), settings=0.2, max_restarts=1) as engines:
        engines.update_weights(0)
        whole = engines.generate(data, step=2)
        found = {}

        async def ask(row):
            return await engines.respond(data.select_indices([row]), step=2, ticket=f"row {row}")

        async def groups():
            tasks = [asyncio.create_task(ask(row)) for row in range(2)]
            await asyncio.sleep(0.3)
            killed_at = time.monotonic()
            lost = kill(engines, 0)
            with pytest.raises(EngineDiedError, match=r"fake engine 0 \(host "):
                await tasks[0]
            found["seconds"] = time.monotonic() - killed_at
            again = await ask(0)
            assert until(lambda: engines.joining), "it has started"
            waits = asyncio.create_task(ask(1))
            await asyncio.to_thread(engines.rejoin)
            assert engine_of(engines, 0) is not lost
            return [again, await tasks[1], await waits]

        answers = asked(groups())
        assert [one["tokens"][0].tolist() for one in answers] == [
            whole["tokens"][r].tolist() for r in (0, 1, 1)
        ]
        assert found["seconds"] < 30, "until the group can be asked elsewhere"


def test_while_no_engine_has_weights_nobody_is_asked(cluster):
    with generation(cluster, Weights(), engines=1, max_restarts=1) as engines:
        told = []
        engines.changed = lambda: told.append((engines.answering, engines.joining))
        engines.update_weights(0)
        assert (engines.answering, engines.joining) == (True, False)
        kill(engines, 0)
        for _ in range(2):
            with pytest.raises(EngineDiedError, match="fake engine"):
                asked(engines.respond(prompts(3), step=1, ticket="lost"))
        until(lambda: told[-2:] == [(False, False), (False, True)])
        engines.rejoin()
        assert (engines.answering, engines.joining) == (True, False)
        assert asked(engines.respond(prompts(3), step=1, ticket="found"))["lengths"].shape == (1,)


def test_an_engine_that_stands_still_is_killed_at_its_deadline(cluster):
    """tests/chaos/kill_table.py has one that is stopped."""
    settings = {"engine": StandsStill, "max_restarts": 2, "call_timeout_s": 3.0}
    with generation(cluster, Weights(), **settings) as engines:
        engines.update_weights(0)
        lost, began = engine_of(engines, 0), time.monotonic()
        with pytest.raises(EngineDiedError, match=r"fake engine 0 .*made no progress for 3 s, at"):
            asked(engines.respond(prompts(3), step=1, ticket="late"))
        assert time.monotonic() - began < 30
        until(lambda: not Path(f"/proc/{lost.process.identity.pid}").exists())


class LosesItsCore(FakeEngine):
    """As an engine with processes of its own: calls raise, and so does its health, once they are gone."""

    async def generate(self, requests, sampling, version=None, ticket=""):
        self._gone = True
        raise RuntimeError("core")

    async def health(self):
        if vars(self).get("_gone"):
            raise RuntimeError("core")


def test_an_engine_whose_own_processes_died_is_lost(cluster):
    with generation(cluster, Weights(), engine=LosesItsCore, max_restarts=1) as engines:
        engines.update_weights(0)
        with pytest.raises(EngineDiedError, match=r"fake engine 0 .*: core"):
            asked(engines.respond(prompts(3), step=1, ticket="lost"))
        assert engines.fleet.restarts == 1


def test_with_no_restart_left_a_death_ends_the_run(cluster):
    with generation(cluster, Weights(), settings=0.5) as engines:
        engines.update_weights(0)

        async def dies():
            group = asyncio.create_task(engines.respond(prompts(3), step=1, ticket="lost"))
            await asyncio.sleep(0.3)
            kill(engines, 0)
            await group

        with pytest.raises(WorkerError, match=r"fake engine 0 \(host .*died") as caught:
            asked(dies())
        assert caught.value.group == "fake"
        assert caught.value.__notes__ == ["policy.generation.max_restarts: 0 in a run, of which none is left"]
        assert engines.joining, "whoever waits hears of it"
        with pytest.raises(WorkerError, match="fake engine 0"):
            engines.rejoin()
