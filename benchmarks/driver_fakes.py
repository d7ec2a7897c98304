"""What `driver_scale` puts in place of a model, and around the calls that a step of GRPO makes."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch

from nemo_rl_mcore.config.logger import LoggerConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import digest_of_ids, digests_of_rows
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.hub import CHAR_EOS, CHAR_VOCABULARY
from nemo_rl_mcore.driver.actors.gang import RayWorkerGroup
from nemo_rl_mcore.driver.algorithms.algorithm import StepObserver
from nemo_rl_mcore.driver.observability import Sample
from nemo_rl_mcore.driver.observability.sinks import RolloutSink
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.engine.engine import Request, Response

EOS = CHAR_VOCABULARY.index(CHAR_EOS)

# The module's name means nothing to a worker.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Rank:
    """What `Policy` calls of a `MegatronPolicyWorker`, and the answers of an engine, without a model."""

    def __init__(self, new_tokens: int) -> None:
        self._new_tokens = new_tokens

    def data_parallel_rank(self) -> int:
        return int(os.environ["RANK"])

    def generate(self, *, data: BatchedDataDict, **_options: Any) -> BatchedDataDict:
        noise = torch.Generator().manual_seed(0)
        tokens_BT = torch.randint(0, 10, (data.size, self._new_tokens), generator=noise)
        tokens_BT[:, -1] = EOS
        lengths_B = torch.full((data.size,), self._new_tokens)
        return BatchedDataDict(
            tokens=tokens_BT,
            logprobs=-torch.rand(tokens_BT.shape, generator=noise) - 3,
            lengths=lengths_B,
            finished=torch.ones(data.size, dtype=torch.bool),
            digests=digests_of_rows(tokens_BT, lengths_B),
        )

    def respond(self, requests: Sequence[Request], version: int) -> list[Response]:
        tokens = [*(number % 10 for number in range(self._new_tokens - 1)), EOS]
        versions, digest = [version] * len(tokens), digest_of_ids(tokens)
        return [
            Response([*tokens], [-3.0 - row / (1 + at) for at in range(len(tokens))], True, versions, digest)
            for row, _ in enumerate(requests)
        ]  # fmt: skip

    def get_logprobs(self, *, data: BatchedDataDict, trained_only: bool) -> BatchedDataDict:
        return BatchedDataDict(logprobs=-3.5 * data["token_mask"])

    def train(self, *, data: BatchedDataDict, gbs: int, **_options: Any) -> dict[str, Any]:
        steps = max(1, data.size * int(os.environ["WORLD_SIZE"]) // gbs)
        totals = dict.fromkeys(("global_valid_seqs", "global_valid_toks", "lr", "wd"), [1.0] * steps)
        return {
            "global_loss": torch.zeros(steps),
            "grad_norm": torch.ones(steps),
            "all_mb_metrics": totals,
            "metric_kinds": {},
            "update_successful": True,
            "skip_reasons": [None] * steps,
        }


class Laps:
    """CPU seconds of this process by part, each from the end of the one before."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._ended = time.process_time()

    def end(self, part: str) -> None:
        before, self._ended = self._ended, time.process_time()
        self.seconds[part] += self._ended - before


class Store:
    """Bytes of tensors that one process puts into the object store and takes out of it."""

    def __init__(self) -> None:
        self.bytes = 0

    def note(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.bytes += value.nbytes
        elif isinstance(value, Mapping):
            for item in value.values():
                self.note(item)


class CountingGroup(RayWorkerGroup):
    """Notes what goes to the ranks and comes from them."""

    store: Store

    def share(self, value: Any) -> Any:
        self.store.note(value)
        return super().share(value)

    def run_all(self, method: str, *args: Any, **options: Any) -> list[Any]:
        answers = super().run_all(method, *args, **options)
        for answer in answers:
            self.store.note(answer)
        return answers


class TimedPolicy:
    """A `Policy` as far as a step asks for it, whose calls are parts of their own."""

    def __init__(self, policy: Policy, laps: Laps) -> None:
        self._policy, self._laps = policy, laps

    def get_logprobs(self, data: BatchedDataDict, *, trained_only: bool = False) -> BatchedDataDict:
        self._laps.end("episodes")
        found = self._policy.get_logprobs(data, trained_only=trained_only)
        self._laps.end("logprobs")
        return found

    def train(self, data: BatchedDataDict, loss_fn: Any) -> dict[str, Any]:
        result = self._policy.train(data, loss_fn)
        self._laps.end("train")
        return result


class TimedGeneration:
    """A `GenerationInterface` over the ranks, or over engines that answer with lists."""

    def __init__(self, answer: Callable[[BatchedDataDict, int], BatchedDataDict], laps: Laps) -> None:
        self._answer, self._laps = answer, laps

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        self._laps.end("prompts")
        answered = self._answer(data, step)
        self._laps.end("generate")
        return answered

    def update_weights(self, version: int) -> None: ...

    def offload(self) -> None: ...


class Scores:
    """An environment that takes no time: rewards differ within a group."""

    def __init__(self, laps: Laps) -> None:
        self._laps = laps

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[float]:
        self._laps.end("answers")
        rewards = [float(row % 3) for row in range(len(responses))]
        self._laps.end("score")
        return rewards


class Prompts:
    """A `PromptSource` of prompts of one length."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        return [Prompt(index, f"{index:0{self._tokens - 1}}>", "") for index in range(count)]

    def validation(self, count: int) -> list[Prompt]:
        return []


class Recording(StepObserver):
    """A `StepObserver` that writes answers down as a run does."""

    def __init__(self, folder: str, laps: Laps) -> None:
        self._sink, self._laps = RolloutSink(Path(folder), LoggerConfig(), None), laps

    def add_samples(self, samples: Iterable[Sample]) -> None:
        self._laps.end("samples")
        self._sink.log(1, list(samples))
        self._laps.end("record")
