"""Engines whose answers come when a test lets them; an `EngineGeneration` for the state of rollouts alone."""

import asyncio
import threading

import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.driver.rollouts.scheduler import DrawnGroup
from nemo_rl_mcore.driver.rollouts.transcript import concatenate_batches
from nemo_rl_mcore.engine.engine import EngineDiedError

TOKENS = 4


class FakeEngines:
    """Answers a group when `hold` lets it through, with the version that is held at each of its tokens."""

    def __init__(self, fail=lambda ticket: None, hold=lambda ticket: 0.0):
        self.version, self.updates, self.asked, self.cancelled, self.steps = None, [], [], [], {}
        self.in_flight, self.most_in_flight, self.in_flight_at_updates = 0, 0, []
        self.fail, self.hold = fail, hold
        self.threads = set()
        self.answering, self.joining, self.restarts = True, False, 0
        self.fleet = self

    @property
    def weights_digest(self):
        return f"{self.version:016x}"

    def update_weights(self, version):
        self.in_flight_at_updates.append(self.in_flight)
        self.version = version
        self.updates.append(version)

    def whereabouts(self, ticket):
        return "engine 0"

    def offload(self): ...

    async def respond(self, data, *, step, ticket):
        self.asked.append(ticket)
        self.steps[ticket] = step
        self.threads.add(threading.current_thread().name)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        versions = []
        try:
            for _ in range(TOKENS):
                await asyncio.sleep(self.hold(ticket))
                versions.append(self.version)
            if (error := self.fail(ticket)) is not None:
                raise error
        except asyncio.CancelledError:
            self.cancelled.append(ticket)
            raise
        finally:
            self.in_flight -= 1
        drawn = torch.tensor(versions).expand(data.size, -1)
        rows = torch.zeros(data.size, TOKENS)
        return BatchedDataDict(
            input_ids=rows,
            generation_logprobs=rows,
            input_lengths=rows.sum(1).long() + TOKENS,
            weight_versions=drawn,
        )


class MortalEngines(FakeEngines):
    """One engine: `die` fails what is asked of it, and `start` brings another one, which `rejoin` gives weights."""

    def __init__(self, **keys):
        super().__init__(**keys)
        self.rejoined, self.failure, self._started = [], None, 0

    async def respond(self, data, *, step, ticket):
        started = self._started
        answered = await super().respond(data, step=step, ticket=ticket)
        if not self.answering or started != self._started:
            raise self.failure or EngineDiedError("engine 0 died")
        return answered

    def die(self, failure=None):
        self.answering, self.failure = False, failure
        self.joining = failure is not None
        self.changed()

    def start(self):
        self.joining = True
        self.changed()

    def rejoin(self):
        if self.failure is not None:
            raise self.failure
        self.rejoined.append((self.version, threading.current_thread().name))
        self._started += 1
        self.answering, self.joining = True, False
        self.restarts += 1

    def update_weights(self, version):
        super().update_weights(version)
        self.answering, self.joining = True, False


class FakeDraw:
    """Groups of two rows; counts what it drew, and in which thread."""

    def __init__(self, groups_per_step):
        self.groups_per_step, self.steps, self.threads = groups_per_step, [], set()

    def groups_of(self, step):
        self.steps.append(step)
        self.threads.add(threading.current_thread().name)
        asked = BatchedDataDict(input_ids=torch.zeros(2, 1))
        return [DrawnGroup((step, place), asked, step) for place in range(self.groups_per_step)]

    @property
    def collector(self):
        return self

    environments = tokenizer = property(lambda self: self)
    pad_token_id = 0

    async def play(self, prompts, asked, respond):
        answered = await respond(asked)
        return BatchedDataDict(answered, replies=[[] for _ in range(answered.size)])

    def unused_for(self, group):
        return None

    def rollout_of(self, groups, batches):
        return Rollout(concatenate_batches(batches, 0), [group.prompt for group in groups], [])

    def check_drops(self, step, rollouts):
        self.checked = sum(rollout.batch.size for rollout in rollouts)

    def take_counts(self):
        return {}
