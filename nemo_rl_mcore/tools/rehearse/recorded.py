"""What a step of a run was given to train on, kept in the driver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.interfaces import GenerationInterface
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.run import Watch
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.rank.batch_sizes import BatchSizes

_OF_TOKENS = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
"""Columns [B,S] of a policy gradient. Those of other losses speak of the next token, whose mask is another."""


@dataclass
class TrainCall:
    """One call of `train`, or one split step: the loss, rows of an optimizer step, and the chunks.

    result: what the ranks answered.
    """

    loss_fn: LossFunction
    gbs: int | None
    mbs: int | None
    chunks: list[BatchedDataDict] = field(default_factory=list[BatchedDataDict])
    result: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def whole(self) -> BatchedDataDict:
        """Return all rows."""
        return BatchedDataDict.from_batches(self.chunks) if len(self.chunks) > 1 else self.chunks[0]

    def with_noise(self) -> TrainCall | None:
        """Return the call with 1 added to the numbers of a policy gradient that do not count; None where none are."""
        rows = self.whole
        ignored = (rows["token_mask"] * rows["sample_mask"][:, None]) == 0
        noisy = {key: rows[key] + ignored for key in _OF_TOKENS if key in rows and "advantages" in rows}
        if not noisy or not ignored.any():
            return None
        return replace(self, chunks=[BatchedDataDict(rows, **noisy)])

    def as_split_steps(self, policy: PolicyConfig, shards: int = 1) -> Iterator[list[BatchedDataDict]]:
        """Yield the chunks of each optimizer step: a sample for each data-parallel rank, then all other samples."""
        sizes = BatchSizes.of(policy, self.loss_fn, self.gbs, self.mbs)
        for batch in sizes.steps(self.whole):
            samples = batch.samples(sizes.rows_per_sample)
            parts = [samples[:shards], samples[shards:]]
            yield [batch.slice(part[0].start, part[-1].stop) for part in parts if part]


class Recorder(Watch):
    """Keeps what policy and critic were trained on since it was last asked, and can reach policy and engine."""

    summary = False

    def __init__(self) -> None:
        self.policy: Policy | None = None
        self._engine: GenerationInterface | None = None
        self._calls: dict[str, list[TrainCall]] = {}

    def model(self, name: str, model: Policy) -> Policy:
        """Return a model with its training calls kept."""
        if name == "policy":
            self.policy = model
        return cast("Policy", _Recorded(model, self._calls.setdefault(name, [])))

    def engine(self, engine: GenerationInterface) -> None:
        """Keep the engine."""
        self._engine = engine

    def take(self, name: str = "policy") -> list[TrainCall]:
        """Return the calls of a model since the last time; none where the run has no such model."""
        calls = self._calls.get(name, [])
        taken = [*calls]
        calls.clear()
        return taken

    def train_split(
        self, calls: Sequence[TrainCall], config: PolicyConfig, shards: int, start: Path, end: Path
    ) -> None:
        """Train once more by the split step, on all ranks.

        start: the checkpoint of the policy to begin with. end: the folder of the one to write.
        """
        assert self.policy is not None
        self.policy.load_checkpoint(str(start))
        for call in calls:
            for chunks in call.as_split_steps(config, shards):
                self.policy.begin_train_step(call.loss_fn, gbs=call.gbs, mbs=call.mbs)
                for chunk in chunks:
                    self.policy.train_microbatch(chunk)
                self.policy.finish_train_step()
        self.policy.save_checkpoint(str(end))

    def sent_digest(self) -> str:
        """Return the digest of the weights that the engines were sent last; empty where the ranks answer."""
        return str(getattr(self._engine, "weights_digest", "") or "")

    def sent_version(self) -> int | None:
        """Return the step after which these weights were; None where the ranks answer."""
        return getattr(self._engine, "weights_version", None)

    def export(self, folder: Path) -> None:
        """Have the ranks write their weights as a Hugging Face folder."""
        assert self.policy is not None
        self.policy.export_hf(str(folder))


class _Recorded:
    """A model as it is, whose calls that train are kept."""

    def __init__(self, policy: Policy, calls: list[TrainCall]) -> None:
        self._policy, self._calls = policy, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        *,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        result = self._policy.train(data, loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs)
        if not eval_mode:
            self._calls.append(TrainCall(loss_fn, gbs, mbs, [data], result))
        return result

    def begin_train_step(self, loss_fn: LossFunction, **sizes: Any) -> None:
        self._policy.begin_train_step(loss_fn, **sizes)
        self._calls.append(TrainCall(loss_fn, sizes.get("gbs"), sizes.get("mbs")))

    def train_microbatch(self, data: BatchedDataDict, **of_chunk: Any) -> None:
        self._policy.train_microbatch(data, **of_chunk)
        self._calls[-1].chunks.append(data)

    def finish_train_step(self) -> dict[str, Any]:
        result = self._policy.finish_train_step()
        self._calls[-1].result = result
        return result
