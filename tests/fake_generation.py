"""The driver's handle over fake engines in Ray, whose weights come from one process."""

import os
import signal
import sys
import time

import nemo_rl_mcore.driver.actors  # noqa: F401 - before ray, which then stays on this machine

# isort: split
import fake_engine
import ray
import torch
from fake_engine import FakeEngine

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.actors.engine_generation import EngineGeneration
from nemo_rl_mcore.driver.actors.places import Placement
from nemo_rl_mcore.engine.engine import EngineKind
from nemo_rl_mcore.rank.refit.sender import open_sender

# pytest's module names mean nothing to a worker.
for module in (fake_engine, sys.modules[__name__]):
    ray.cloudpickle.register_pickle_by_value(module)

STOP = (0, 1, 2, 3, 4, 5)


class Weights:
    """A `WeightSource` of one process; `fail` breaks the next refit off, `before_sending` is called in it."""

    placement, incarnation = Placement(()), 0

    def __init__(self):
        self.scale, self.fail, self.sent, self.connected = 1.0, False, 0, []
        self.before_sending = self.before_waking = None

    def gpus(self):
        return ()

    def connect_engines(self, engines, settings):
        self.connected.append(engines.numbers)
        self._sender = open_sender(settings, engines, torch.device("cpu"))

    def prepare_for_lp_inference(self):
        self.before_waking()

    def send_weights(self):
        if self.fail:
            self.fail = False
            raise RuntimeError("broke off")
        if self.before_sending is not None:
            before, self.before_sending = self.before_sending, None
            before()
        self.sent += 1
        return self._sender.send((f"weight.{i}", torch.full((50,), self.scale)) for i in range(10))


def kind(**changes):
    return EngineKind(
        **{
            "name": "fake", "engine": FakeEngine, "settings": 0.0, "environment": {}, "engines": 2, "processes": 1,
            "sleeps": False, "bucket_bytes": 1024,
            "call_timeout_s": 60.0, "max_restarts": 0, **changes,
        }
    )  # fmt: skip


def generation(cluster, source, transport=None, keys=None, check=None, offload="none", **changes):
    config = PolicyConfig.model_validate(
        {
            "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 32},
            "tokenizer": {"name": "char"},
            "train_global_batch_size": 8,
            "train_micro_batch_size": 8,
            "max_total_sequence_length": 16,
            "megatron_cfg": {"optimizer": {"lr": 1e-3}},
            "offload": offload,
            "generation": {
                "backend": "vllm",
                "max_new_tokens": 6,
                "refit_transport": transport,
                **(keys or {}),
            },
        }
    )
    return EngineGeneration(kind(**changes), config, cluster, source, stop_ids=STOP, seed=3, check=check)


def engine_of(engines, number):
    return until(lambda: {one.number: one for one in engines.fleet.live}.get(number))


def kill(engines, number, how=signal.SIGKILL):
    engine = engine_of(engines, number)
    os.kill(engine.process.identity.pid, how)
    return engine


def until(condition, within_s=60.0):
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)
    return found


def prompts(*lengths):
    rows = torch.arange(len(lengths))
    return BatchedDataDict(
        input_ids=torch.ones(len(lengths), max(lengths), dtype=torch.long),
        input_lengths=torch.tensor(lengths),
        prompt_index=rows,
        sample_index=torch.zeros_like(rows),
    )
