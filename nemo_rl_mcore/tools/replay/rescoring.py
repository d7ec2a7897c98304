"""Compare the log-probabilities of kept tokens with those of the weights that they name.

Shapes: B rows, S columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.logprobs import trained_inputs
from nemo_rl_mcore.driver.interfaces import PolicyInterface
from nemo_rl_mcore.driver.rollouts.player import concatenate_batches
from nemo_rl_mcore.driver.rollouts.transcript import TURN_OF_TOKEN, WEIGHT_VERSIONS
from nemo_rl_mcore.errors import RunStoppedError


@dataclass
class Rescored:
    """Counts what became of a step's tokens.

    tokens: rescored. older: of weights that the replay does not pass through. cached: after other weights in their own
    answer, of an engine that keeps its cache: no weights alone give their log-probabilities. largest: difference, nats.
    """

    tokens: int = 0
    older: int = 0
    cached: int = 0
    largest: float = 0.0

    def __str__(self) -> str:
        """Say so in a line."""
        left_out = {"of older weights": self.older, "after a change of weights in their answer": self.cached}
        others = [f"{count} {which}" for which, count in left_out.items() if count]
        shown = f"{self.tokens} tokens rescored, largest difference {self.largest:.2g}"
        return shown + (f" (not compared: {', '.join(others)})" if others else "")


@dataclass
class Rescoring:
    """Rescores kept tokens while a replay passes through the versions.

    allowed: difference of a log-probability, nats. rereads: whether engines read a begun answer again with new weights.
    """

    policy: PolicyInterface
    allowed: float
    rereads: bool
    pad_token_id: int
    first_version: int
    _steps: dict[int, Rescored] = field(default_factory=dict[int, Rescored], init=False)

    def rescore(self, version: int, steps: Mapping[int, Mapping[int, BatchedDataDict]]) -> None:
        """Rescore the tokens of a version, which the policy holds.

        steps: those that it may have drawn tokens of, with their groups by position. Raises RunStoppedError for a token
        that has another log-probability, naming it.
        """
        for step, groups in steps.items():
            if step not in self._steps:
                self._steps[step] = self._of_step(groups)
            self._rescore(version, step, groups)

    def take(self, step: int) -> Rescored:
        """Return what became of a step's tokens, once all of its versions were passed."""
        return self._steps.pop(step)

    def _of_step(self, groups: Mapping[int, BatchedDataDict]) -> Rescored:
        found = Rescored()
        for group in groups.values():
            versions, exact = group[WEIGHT_VERSIONS], self._exact(group)
            older = (versions >= 0) & (versions < self.first_version)
            found.older += int(older.sum())
            found.cached += int(((versions >= 0) & ~older & ~exact).sum())
        return found

    def _exact(self, group: BatchedDataDict) -> Tensor:
        """Return bool [B, S]: whether the version of a token is that of all that its answer read and sampled before."""
        return (group[WEIGHT_VERSIONS] >= 0) if self.rereads else unmixed(group)

    def _rescore(self, version: int, step: int, groups: Mapping[int, BatchedDataDict]) -> None:
        parts = [self._asked(version, group) for group in groups.values()]
        places = [(position, row) for position, (rows, _) in zip(groups, parts, strict=True) for row in rows]
        if not places:
            return
        batch = concatenate_batches([part for rows, part in parts if rows], self.pad_token_id)
        now = self.policy.get_logprobs(trained_inputs(batch), trained_only=True)["logprobs"]
        kept, mask = batch["generation_logprobs"], batch["token_mask"].bool()
        difference = (now - kept).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(~mask, 0)
        largest = float(difference.max())
        if largest > self.allowed:
            place, token = divmod(int(difference.argmax()), difference.shape[1])
            position, row = places[place]
            raise RunStoppedError(
                f"step {step}: group {position}, row {row}, token {token}: version {version} is said to have drawn it "
                f"with the log-probability {float(kept[place, token]):.6g}, and gives it "
                f"{float(now[place, token]):.6g} now; they may differ by {self.allowed:.3g}",
                code="rescored-differs",
            )
        found = self._steps[step]
        found.tokens += int(mask.sum())
        found.largest = max(found.largest, largest)

    def _asked(self, version: int, group: BatchedDataDict) -> tuple[list[int], BatchedDataDict]:
        """Return the rows with tokens to rescore, and these rows, whose token_mask is 1 at such tokens."""
        mask = (group[WEIGHT_VERSIONS] == version) & self._exact(group)
        rows = mask.any(1).nonzero().flatten()
        columns = {key: group[key][rows] for key in ("input_ids", "input_lengths", "generation_logprobs")}
        numbers: list[int] = rows.tolist()  # pyright: ignore[reportUnknownMemberType]
        return numbers, BatchedDataDict(columns, token_mask=mask[rows].float())


def unmixed(group: BatchedDataDict) -> Tensor:
    """Return bool [B, S]: the tokens drawn by the version that began their answer, in the same turn of their row."""
    versions = group[WEIGHT_VERSIONS]
    sampled = versions >= 0
    turns = group.get(TURN_OF_TOKEN, sampled.long())
    found = torch.zeros_like(sampled)
    for turn in range(1, int(turns.max()) + 1):
        of_turn = sampled & (turns == turn)
        began = versions.gather(1, of_turn.long().argmax(1, keepdim=True))
        found |= of_turn & (versions == began)
    return found
