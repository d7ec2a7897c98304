"""What is proven of a run: each proof compares two ways to the same numbers, within docs/numerics.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from nemo_rl_mcore.config.offline import DPOConfig
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.losses.custom import make_loss
from nemo_rl_mcore.losses.dpo import DPOLossFn
from nemo_rl_mcore.models import missing_family
from nemo_rl_mcore.tools.rehearse import tolerances
from nemo_rl_mcore.tools.rehearse.compared import (
    Found,
    Refused,
    require_close,
    require_comparable_balance,
    require_equal,
    require_movement,
    require_same_results,
    require_several_ranks,
    within,
)
from nemo_rl_mcore.tools.rehearse.one_rank import difference, one_rank
from nemo_rl_mcore.tools.rehearse.ran import Ran, Row
from nemo_rl_mcore.tools.rehearse.schedule import Schedule
from nemo_rl_mcore.tools.rehearse.transformers_logprobs import transformers_logprobs

_OF_THE_MACHINE = ("timing/", "performance/", "async/")


def learning_rates(ran: Ran, schedule: Schedule, factor: float) -> str:
    """Compare the learning rate of each step with the schedule's closed form; factor: that of the rehearsal."""
    steps = len(ran.calls[0]) and sum(_optimizer_steps(ran, call) for call in ran.calls[0])
    if not steps:
        raise Refused("the first step trained on nothing")
    for number, row in enumerate(ran.rows):
        expected = factor * schedule.rate(number * steps + steps - 1)
        if not math.isclose(row["train/lr"], expected, rel_tol=tolerances.LEARNING_RATE, abs_tol=1e-15):
            raise Found(
                f"step {number + 1}: {row['train/lr'] / factor:.6g}, and {expected / factor:.6g} by the recipe"
            )
    rates = ", ".join(f"{row['train/lr'] / factor:.4g}" for row in ran.rows)
    return f"{rates} after {steps} optimizer step{'s' * (steps > 1)} each"


def _optimizer_steps(ran: Ran, call: Any) -> int:
    return len(cast("Sequence[object]", call.result["skip_reasons"]))


def resumes(ran: Ran, rows: Sequence[Row]) -> str:
    """Compare the last step of a run that went on from a copy with that of the run itself, bit by bit."""
    if ran.config.asynchrony.off_policy:
        raise Refused(
            "which weights sample what in an asynchronous run depends on time; see layout = one rank"
        )
    before, after = ran.rows[-1], rows[-1]
    names = [name for name in before if not name.startswith(_OF_THE_MACHINE) and name in after]
    wrong = [name for name in names if _differ(before[name], after[name])]
    if wrong:
        name = wrong[0]
        raise Found(
            f"{name} is {after[name]:.8g}, and {before[name]:.8g} undisturbed; {len(wrong)} metrics differ"
        )
    return f"{len(names)} metrics equal"


def resumed_states(ran: Ran) -> str:
    """Compare what the resumed run saved, weights and the optimizer's state of each model, bit by bit."""
    if not ran.step(2, "killed").is_dir():
        raise Found("the resumed run saved nothing")
    tensors = 0
    for plan in ran.on_one_rank().models.values():
        if not plan.trained:
            continue
        with one_rank(plan.policy, role=plan.role) as one:
            saved, resumed = one.states(ran.step(2)), one.states(ran.step(2, "killed"))
        require_equal(saved, resumed, f"{plan.name}: what is saved after the resumed step")
        tensors += len(saved)
    return f"{tensors} tensors of weights and optimizers equal bit by bit"


def _differ(one: float, other: float) -> bool:
    return one != other and not (math.isnan(one) and math.isnan(other))


def sampled(ran: Ran) -> str:
    """Compare the log-probabilities of sampling with those of training, by the response that differs most."""
    name = "mismatch/max_seq_mult_prob_error"
    found = [math.log(row[name]) for row in ran.rows if name in row]
    if not found:
        raise Refused("the answers are given, not sampled")
    if max(found) > tolerances.GENERATION:
        step = found.index(max(found)) + 1
        raise Found(f"step {step}: a response differs by {max(found):.2g} nats a token")
    return f"{max(found):.1e} nats a token at most"


@dataclass
class Twins:
    """A run's last step once more, on one rank, from the checkpoint before it.

    Each check is a method; what several of them need is computed once.
    """

    ran: Ran

    @property
    def _calls(self) -> list[Any]:
        return self.ran.calls[-1]

    @property
    def _rows(self) -> BatchedDataDict:
        """Return the first rows of the step."""
        return self._calls[0].whole

    @property
    def _temperature(self) -> float:
        return self.ran.config.logprob_temperature

    @cached_property
    def _plain(self) -> dict[str, Any]:
        """Return the weights before and after the step as they were saved, and after it on one rank; digests."""
        if reason := missing_family(self.ran.config.policy.model):
            raise Refused(reason)  # weights are read by their names there
        found: dict[str, Any] = {}
        with one_rank(self._policy(), temperature=self._temperature) as one:
            for step in (1, 2):
                found[f"saved {step}"] = one.load(self.ran.step(step))
                found[f"digest {step}"] = one.digest()
            found["logprobs"] = one.logprobs(self._rows)
            one.load(self.ran.step(1))
            found["results"] = one.train(self._calls)
            found["train"] = one.tensors()
            one.load(self.ran.step(1))
            one.train_split(self._calls)
            found["split"] = one.tensors()
            found["split on all"] = one.load(self.ran.split)
        return found

    def _policy(self, **changes: object) -> PolicyConfig:
        return self.ran.on_one_rank(**changes).policy

    def _require_movement(self, tolerance: float) -> None:
        require_movement(self._plain["saved 1"], self._plain["saved 2"], tolerance)

    def layout(self) -> str:
        """Compare the step of all ranks with that of one."""
        require_several_ranks(self.ran.layout.ranks)
        require_comparable_balance(self.ran.config)
        self._require_movement(tolerances.REORDERED)
        require_same_results(self._calls, self._plain["results"])
        return within(self._plain["saved 2"], self._plain["train"], tolerances.REORDERED)

    def split(self) -> str:
        """Compare the split step with `train`, on one rank and on all."""
        self._require_movement(tolerances.REORDERED)
        alone = within(self._plain["train"], self._plain["split"], tolerances.REORDERED)
        if self.ran.layout.ranks == 1:
            return alone
        on_all = difference(self._plain["saved 2"], self._plain["split on all"])
        if on_all > tolerances.REORDERED:
            ranks = self.ran.layout.ranks
            raise Found(
                f"a weight differs by {on_all:.2g} on {ranks} ranks, {tolerances.REORDERED:g} is allowed"
            )
        return f"{alone}; on all ranks {on_all:.1e}"

    def masked(self) -> str:
        """Compare the step with one whose numbers per token are others wherever the masks say that none counts."""
        self._require_movement(tolerances.REORDERED)
        changed = [call.with_noise() for call in self._calls]
        if all(call is None for call in changed):
            raise Refused("no policy gradient, or every token counts")
        calls = [noisy or call for noisy, call in zip(changed, self._calls, strict=True)]
        with one_rank(self._policy(), temperature=self._temperature) as one:
            one.load(self.ran.step(1))
            for plain, noisy in zip(self._plain["results"], one.train(calls), strict=True):
                require_close(
                    "global_loss", plain["global_loss"], noisy["global_loss"], "with other numbers there"
                )
            return within(self._plain["train"], one.tensors(), tolerances.REORDERED)

    def refits(self) -> str:
        """Compare the digest of what engines were sent last with that of a checkpoint, read on one rank."""
        if self.ran.config.policy.generation.decodes_on_ranks:
            raise Refused("the ranks answer themselves: no weights are sent")
        if not self.ran.digest:
            raise Refused("nothing was sampled")
        step = self.ran.version
        if step not in (1, 2):
            raise Refused(f"engines were sent the weights of step {step} last, and no checkpoint has these")
        if self.ran.digest != (saved := self._plain[f"digest {step}"]):
            raise Found(f"engines have {self.ran.digest}, and the checkpoint of step {step} is {saved}")
        return f"{self.ran.digest} is that of step {step}"

    def fused(self) -> str:
        """Compare the fused log-probabilities with the unfused ones."""
        key = "use_fused_linear_logprobs"
        if not getattr(self.ran.config.policy.megatron_cfg, key):
            raise Refused("the recipe has them unfused")
        changes = {f"megatron_cfg__{key}": False}
        changes |= {
            f"megatron_cfg__fused_linear_logprobs_{name}": False for name in ("packed", "context_parallel")
        }
        return self._beside(self._policy(**changes), tolerances.FIVE_STEPS, self._unfused_loss())

    def _unfused_loss(self) -> LossFunction | None:
        config = self.ran.config
        loss = config.losses.get("loss_fn")
        if loss is not None:
            return make_loss(loss)
        return DPOLossFn(config.loop.loss) if isinstance(config.loop, DPOConfig) else None

    def packed(self) -> str:
        """Compare rows that share rows, or have a token budget, with padded ones."""
        policy = self.ran.config.policy
        if not policy.sequence_packing.enabled and not policy.dynamic_batching.enabled:
            raise Refused("the recipe pads")
        require_comparable_balance(self.ran.config)
        padded = {"sequence_packing__enabled": False, "dynamic_batching__enabled": False}
        padded["megatron_cfg__fused_linear_logprobs_packed"] = False
        return self._beside(self._policy(**padded), tolerances.REORDERED)

    def _beside(self, policy: PolicyConfig, tolerance: float, loss_fn: LossFunction | None = None) -> str:
        self._require_movement(tolerance)
        with one_rank(policy, temperature=self._temperature) as one:
            one.load(self.ran.step(1))
            one.train(self._calls, loss_fn)
            return within(self._plain["train"], one.tensors(), tolerance)

    def exported(self) -> str:
        """Compare what was exported, read again, with the checkpoint, bit by bit."""
        if reason := missing_family(self.ran.config.policy.model):
            raise Refused(reason)
        read = self._policy(model_name=str(self.ran.exported), model=None)
        with one_rank(read, temperature=self._temperature, trained=False) as one:
            require_equal(self._plain["saved 2"], one.tensors(), "weights that were exported")
        return f"{len(self._plain['saved 2'])} tensors equal bit by bit"

    def transformers(self) -> str:
        """Compare log-probabilities of the last checkpoint with those of transformers from the exported folder."""
        expected, rows = self._plain["logprobs"], self._rows
        found = float(
            (expected - transformers_logprobs(self.ran.exported, rows, self._temperature)).abs().max()
        )
        if not found <= tolerances.TRANSFORMERS:
            raise Found(f"a token differs by {found:.2g} nats, and {tolerances.TRANSFORMERS:g} is allowed")
        return f"{int(rows['input_lengths'].sum())} tokens within {found:.1e} of {tolerances.TRANSFORMERS:g} nats"


def make_teacher(policy: PolicyConfig, folder: Path) -> None:
    """Write random weights of an architecture as a Hugging Face folder."""
    with one_rank(policy, seed=7, trained=False) as one:
        one.export(folder)
