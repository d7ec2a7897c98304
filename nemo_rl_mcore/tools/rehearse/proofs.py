"""Proofs about a run: each computes the same numbers in two ways, and compares them within docs/numerics.md's bounds.

The second way is usually the run's last step repeated on one rank in this process, from the run's checkpoint and with
the rows of all its ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from nemo_rl_mcore.config import ClusterConfig, PolicyConfig, Role
from nemo_rl_mcore.config.algorithm import DPOConfig
from nemo_rl_mcore.config.base import Tree
from nemo_rl_mcore.config.master import GRPOMasterConfig, PPOMasterConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import ROUTED_EXPERTS
from nemo_rl_mcore.driver.actors.one_process import InProcessRank, OneProcess
from nemo_rl_mcore.driver.algorithms.algorithm import policy_loss
from nemo_rl_mcore.losses.answers import DPOLossFn
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.losses.custom import make_loss
from nemo_rl_mcore.models import missing_family
from nemo_rl_mcore.ops.sampling import SamplingParams, at_temperature, filter_logits
from nemo_rl_mcore.rank.worker import MegatronPolicyWorker
from nemo_rl_mcore.tools.check.given_weights import ONE_RANK
from nemo_rl_mcore.tools.migrate.draft import put
from nemo_rl_mcore.tools.rehearse.runs import EXPORTED, KILLED, SPLIT, Found, Ran, TrainCall
from nemo_rl_mcore.tools.rehearse.schedule import Schedule

# Parameters after up to three Adam steps at lr 1e-2 that add the same sums in another order. Adam divides each gradient
# by its own magnitude, so a rounding error reaches the weight in full however tiny the gradient is.
REORDERED = 5e-6
# Parameters after five such steps whose log-probabilities come from another algorithm.
FIVE_STEPS = 1e-5
# Log-probabilities of generation and of get_logprobs.
GENERATION = 1e-4
# Parameters after three Adam steps over the same microbatches, by the split step and by train.
SPLIT_STEP = 1e-6
# Log-probabilities here and in transformers.
TRANSFORMERS = 1e-4
# A step's metrics.
METRICS = {"rel": 1e-4, "abs": 1e-5}
# A step's learning rate, relative to the recipe's.
LEARNING_RATE = 1e-9


_MOVED = 50
"""A step's results are compared only if some weight moves by at least this many tolerances."""

# A step on one rank

Tensors = Mapping[str, torch.Tensor]


class _Readable(MegatronPolicyWorker):
    """A rank whose weights can be read."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of all weights: a policy's by Hugging Face name, a critic's by Megatron name."""
        if self.role is Role.POLICY:
            return {name: tensor.detach().clone() for name, tensor in self.backend.full_tensors()}
        return {name: parameter.detach().clone() for name, parameter in self._parameters().items()}

    def states(self) -> dict[str, torch.Tensor]:
        """Return copies of all weights and their optimizer states, by Megatron name."""
        from nemo_rl_mcore.rank.megatron.optimizer_state import states_of_weights

        parameters = self._parameters()
        names = {id(parameter): name for name, parameter in parameters.items()}
        kept = {
            f"{kind} of {names[id(weight)]}": tensor
            for weight, kinds in states_of_weights(cast("Any", self.backend).optimizer)
            for kind, tensor in kinds.items()
        }
        return {name: tensor.detach().clone() for name, tensor in {**parameters, **kept}.items()}

    def _parameters(self) -> dict[str, torch.Tensor]:
        # Megatron takes seconds to import, and shrinking a recipe does not need it.
        from nemo_rl_mcore.rank.megatron.model_class import language_models
        from nemo_rl_mcore.rank.megatron.optimizer_state import gather_parameters

        chunks = cast("Any", self.backend).chunks
        gather_parameters(chunks)
        return {
            name: parameter
            for model in language_models(chunks)
            for name, parameter in model.named_parameters()
        }


@dataclass(frozen=True)
class OneRank:
    """A model on one rank; `one_rank` starts it. name: its folder in a checkpoint."""

    group: InProcessRank
    name: str

    def call(self, method: str, **arguments: Any) -> Any:
        return self.group.run_all(method, **arguments)[0]

    def load(self, checkpoint: Path, read: str = "tensors") -> Tensors:
        """Load weights, optimizer and schedule from a folder step_N; return the weights, or with "states" both."""
        self.call("load_checkpoint", folder=str((checkpoint / self.name).absolute()))
        return self.call(read)

    def train(self, calls: Sequence[TrainCall], loss_fn: LossFunction | None = None) -> list[dict[str, Any]]:
        """Repeat the run's training calls, each with its whole batch; loss_fn: replaces the calls' own."""
        return [
            self.call("train", data=call.whole, loss_fn=loss_fn or call.loss_fn, gbs=call.gbs, mbs=call.mbs)
            for call in calls
        ]


@contextmanager
def one_rank(
    policy: PolicyConfig,
    *,
    seed: int = 42,
    temperature: float | None = None,
    trained: bool = True,
    role: Role = Role.POLICY,
) -> Generator[OneRank]:
    """Start a model on one rank in this process. temperature: for log-probabilities. trained: create an optimizer."""
    with OneProcess(ClusterConfig()) as place:
        options = {"seed": seed, "temperature": temperature, "trained": trained, "role": role}
        options["init_reference_model"] = False
        group = InProcessRank(_Readable, place, (policy,), options, deadline_keys="policy", name="one")
        try:
            yield OneRank(group, role.value)
        finally:
            group.shutdown()


def make_teacher(tree: Tree, folder: Path) -> None:
    """Write a Hugging Face folder of random weights with the architecture of the recipe's policy."""
    alone: Tree = {"policy": copy.deepcopy(tree["policy"])}
    for path, value in ONE_RANK.items():
        if path.startswith("policy."):
            put(alone, path, value)
    with one_rank(PolicyConfig.model_validate(alone["policy"]), seed=7, trained=False) as one:
        one.call("export_hf", folder=str(folder))


# Comparisons


class Refused(Exception):
    """The reason for skipping a proof: the recipe does not use the feature, or the numbers cannot be compared."""


def difference(left: Tensors, right: Tensors) -> float:
    """Return the largest difference between two models' weights, relative to the larger of 1 and the largest entry.

    Infinite if names or shapes differ, or a number is not finite in only one model.
    """
    shapes = [{name: weight.shape for name, weight in model.items()} for model in (left, right)]
    if shapes[0] != shapes[1]:
        return math.inf
    found = list[float]()
    for name, weight in left.items():
        largest = weight.double().abs().max().clamp(min=1.0)
        share = (weight.double() - right[name].double()).abs().max() / largest
        found.append(float(torch.nan_to_num(share, nan=math.inf)))
    return max(found)


def require_movement(before: Tensors, after: Tensors, tolerance: float) -> None:
    """Raise Refused if a step changes the weights too little to be detected."""
    moved = difference(before, after)
    if moved < _MOVED * tolerance:
        raise Refused(f"the step moved no weight by more than {moved:.1e}, too little to compare")


def require_comparable(ran: Ran, *, on_several_ranks: bool) -> None:
    """Raise Refused if the run lacks several ranks, or its loss depends on which rows share a microbatch."""
    if on_several_ranks and ran.layout.ranks == 1:
        raise Refused("the recipe has one rank")
    model = ran.config.policy.model
    if model.load_balancing_loss and model.moe_router_load_balancing_type == "aux_loss":
        raise Refused(
            "aux_loss balances each microbatch, and one rank has different ones (seq_aux_loss can be compared)"
        )


def require_close(
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    names: Sequence[str] = ("global_loss", "grad_norm"),
    where: str = "on one rank",
) -> None:
    """Compare these metrics of two training calls within METRICS; raises Found."""
    for name in names:
        pairs = zip(expected[name].flatten().tolist(), found[name].flatten().tolist(), strict=True)
        for left, right in pairs:
            if not math.isclose(left, right, rel_tol=METRICS["rel"], abs_tol=METRICS["abs"]):
                raise Found(f"{name} is {left:.6g}, and {right:.6g} {where}")


def within(left: Tensors, right: Tensors, tolerance: float, where: str = "") -> str:
    """Compare all weights of two models; raises Found."""
    found = difference(left, right)
    if found > tolerance:
        raise Found(f"a weight differs by {found:.2g}{where}; the tolerance is {tolerance:g}")
    return f"weights within {found:.1e} (tolerance {tolerance:g})"


def require_equal(left: Tensors, right: Tensors, what: str) -> None:
    """Compare all weights of two models bit by bit; raises Found with the first that differs."""
    if difference(left, right):
        names = [name for name in left if name not in right or not left[name].equal(right[name])]
        which = f"{len(names)} differ, the first is {names[0]}" if names else "the names differ"
        raise Found(f"{what}: {which}")


# Proofs

_OF_THE_MACHINE = ("timing/", "performance/", "async/")


def learning_rates(ran: Ran, schedule: Schedule, factor: float) -> str:
    """Compare each step's learning rate with the schedule's closed form; factor: multiplies the recipe's rates."""
    steps = sum(len(call.result["skip_reasons"]) for call in ran.calls[0])
    if not steps:
        raise Refused("the first step trained on nothing")
    for number, row in enumerate(ran.rows):
        expected = factor * schedule.rate(number * steps + steps - 1)
        if not math.isclose(row["train/lr"], expected, rel_tol=LEARNING_RATE, abs_tol=1e-15):
            raise Found(
                f"step {number + 1}: {row['train/lr'] / factor:.6g}, but {expected / factor:.6g} by the recipe"
            )
    rates = ", ".join(f"{row['train/lr'] / factor:.4g}" for row in ran.rows)
    return f"{rates} after {steps} optimizer step{'s' * (steps > 1)} each"


def resumed(ran: Ran) -> str:
    """Compare the last step of the resumed copy with the run's own, bit by bit.

    Compared are the metrics and each model's saved weights and optimizer states.
    """
    if ran.config.max_age:
        raise Refused(
            "in an asynchronous run, timing decides which weights sample what; see layout = one rank"
        )
    before, after = ran.rows[-1], ran.resumed_rows[-1]
    names = [name for name in before if not name.startswith(_OF_THE_MACHINE) and name in after]
    none = [name for name in names if math.isnan(before[name]) and math.isnan(after[name])]
    wrong = [name for name in names if before[name] != after[name] and name not in none]
    if wrong:
        name = wrong[0]
        raise Found(
            f"{name} is {after[name]:.8g}, but {before[name]:.8g} undisturbed; {len(wrong)} metrics differ"
        )
    if not ran.step(2, KILLED).is_dir():
        raise Found("the resumed run saved nothing")
    tensors = 0
    for plan in ran.on_one_rank().models.values():
        if not plan.trained:
            continue
        with one_rank(plan.policy, role=plan.role) as one:
            saved, again = one.load(ran.step(2), "states"), one.load(ran.step(2, KILLED), "states")
        require_equal(saved, again, f"{plan.name}: the checkpoint after the resumed step")
        tensors += len(saved)
    return f"{len(names)} metrics equal, {tensors} tensors of weights and optimizers equal bit by bit"


def sampled(ran: Ran) -> str:
    """Compare the log-probabilities from sampling and training for the response in which they differ most."""
    name = "mismatch/max_seq_mult_prob_error"
    found = [math.log(row[name]) for row in ran.rows if name in row]
    if not found:
        raise Refused("the answers are given, not sampled")
    if max(found) > GENERATION:
        step = found.index(max(found)) + 1
        raise Found(f"step {step}: a response differs by {max(found):.2g} nats per token")
    return f"at most {max(found):.1e} nats per token"


_OF_TOKENS = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
"""A policy gradient's columns [B, S]. Other losses' columns describe the next token, which has its own mask."""


@dataclass
class Twins:
    """Repeats a run's last step on one rank, from the checkpoint before it; each public method is a proof."""

    ran: Ran

    @cached_property
    def _plain(self) -> dict[str, Any]:
        """The saved weights before and after the step, the weights after it on one rank, and digests."""
        if reason := missing_family(self.ran.config.policy.model):
            raise Refused(reason)  # weights are read by their Hugging Face names
        calls, found = self.ran.calls[-1], dict[str, Any]()
        policy = self.ran.on_one_rank().policy
        with one_rank(policy, temperature=self.ran.config.logprob_temperature) as one:
            for step in (1, 2):
                found[f"saved {step}"] = one.load(self.ran.step(step))
                found[f"digest {step}"] = one.call("weights_digest")
            rows = calls[0].whole.without(ROUTED_EXPERTS)  # transformers replays no routes
            found["logprobs"] = one.call("get_logprobs", data=rows)["logprobs"]
            one.load(self.ran.step(1))
            found["results"] = one.train(calls)
            found["train"] = one.call("tensors")
            one.load(self.ran.step(1))
            for call in calls:
                for method, given in call.split_calls(policy):
                    one.call(method, **given)
            found["split"] = one.call("tensors")
            found["split on all"] = one.load(self.ran.folder / SPLIT)
        return found

    def _once_more(
        self,
        tolerance: float,
        changes: Mapping[str, bool] | None = None,
        calls: Sequence[TrainCall] = (),
        loss_fn: LossFunction | None = None,
    ) -> str:
        """Repeat the step and compare its weights. calls: calls with other rows, whose loss must be the same.

        changes: keys of the policy, with __ for the dots.
        """
        require_movement(self._plain["saved 1"], self._plain["saved 2"], tolerance)
        policy = self.ran.on_one_rank(**changes or {}).policy
        with one_rank(policy, temperature=self.ran.config.logprob_temperature) as one:
            one.load(self.ran.step(1))
            results = one.train(calls or self.ran.calls[-1], loss_fn)
            for expected, found in zip(self._plain["results"], results, strict=True) if calls else ():
                require_close(expected, found, ("global_loss",), "with other numbers at masked tokens")
            return within(self._plain["train"], one.call("tensors"), tolerance)

    def layout(self) -> str:
        """Compare the step on all ranks with the step on one."""
        require_comparable(self.ran, on_several_ranks=True)
        require_movement(self._plain["saved 1"], self._plain["saved 2"], REORDERED)
        for call, result in zip(self.ran.calls[-1], self._plain["results"], strict=True):
            require_close(call.result, result)
        return within(self._plain["saved 2"], self._plain["train"], REORDERED)

    def split(self) -> str:
        """Compare the split step with `train`, on one rank and on all."""
        require_movement(self._plain["saved 1"], self._plain["saved 2"], REORDERED)
        alone = within(self._plain["train"], self._plain["split"], REORDERED)
        ranks = self.ran.layout.ranks
        if ranks == 1:
            return alone
        on_all = self._plain["saved 2"], self._plain["split on all"]
        within(*on_all, REORDERED, f" on {ranks} ranks")
        return f"{alone}; on all ranks {difference(*on_all):.1e}"

    def masked(self) -> str:
        """Compare the step with a copy in which 1 is added to every per-token number that the masks leave out."""
        calls, changed = self.ran.calls[-1], list[TrainCall]()
        require_movement(self._plain["saved 1"], self._plain["saved 2"], REORDERED)
        for call in calls:
            rows = call.whole
            ignored = (rows["token_mask"] * rows["sample_mask"][:, None]) == 0
            noisy = {key: rows[key] + ignored for key in _OF_TOKENS if key in rows and "advantages" in rows}
            if noisy and ignored.any():
                call = replace(call, chunks=[BatchedDataDict(rows, **noisy)])
            changed.append(call)
        if all(one is call for one, call in zip(changed, calls, strict=True)):
            raise Refused("no policy gradient, or every token counts")
        return self._once_more(REORDERED, calls=changed)

    def refits(self) -> str:
        """Compare the digest of the weights last sent to engines with that checkpoint's digest, read on one rank."""
        if self.ran.config.policy.generation.decodes_on_ranks:
            raise Refused("the ranks generate themselves: no weights are sent")
        if not self.ran.digest:
            raise Refused("nothing was sampled")
        step = self.ran.version
        if step not in (1, 2):
            raise Refused(f"the weights last sent to engines are step {step}'s, which has no checkpoint")
        if self.ran.digest != (saved := self._plain[f"digest {step}"]):
            raise Found(f"the engines' digest is {self.ran.digest}, and step {step}'s checkpoint has {saved}")
        return f"{self.ran.digest} is step {step}'s"

    def fused(self) -> str:
        """Compare the fused log-probabilities with the unfused ones."""
        config, key = self.ran.config, "use_fused_linear_logprobs"
        if not getattr(config.policy.megatron_cfg, key):
            raise Refused("the recipe does not fuse them")
        off = (key, "fused_linear_logprobs_packed", "fused_linear_logprobs_context_parallel")
        changes = {f"megatron_cfg__{name}": False for name in off}
        unfused, loss = self.ran.on_one_rank(**changes), None
        if isinstance(unfused, GRPOMasterConfig | PPOMasterConfig):
            loss = policy_loss(unfused)
        elif (section := config.losses.get("loss_fn")) is not None:
            loss = make_loss(section)
        elif isinstance(config.loop, DPOConfig):
            loss = DPOLossFn(config.loop)
        return self._once_more(FIVE_STEPS, changes, loss_fn=loss)

    def packed(self) -> str:
        """Compare packed rows, or microbatches by token budget, with padded rows."""
        policy = self.ran.config.policy
        if not policy.sequence_packing.enabled and not policy.dynamic_batching.enabled:
            raise Refused("the recipe pads")
        require_comparable(self.ran, on_several_ranks=False)
        padded = {"sequence_packing__enabled": False, "dynamic_batching__enabled": False}
        padded["megatron_cfg__fused_linear_logprobs_packed"] = False
        return self._once_more(REORDERED, padded)

    def exported(self) -> str:
        """Read the exported weights back, and compare them with the checkpoint bit by bit."""
        saved, exported = self._plain["saved 2"], str(self.ran.folder / EXPORTED)
        policy = self.ran.on_one_rank(model_name=exported, model=None).policy
        with one_rank(policy, temperature=self.ran.config.logprob_temperature, trained=False) as one:
            require_equal(saved, one.call("tensors"), "exported weights")
        return f"{len(saved)} tensors equal bit by bit"

    def transformers(self) -> str:
        """Compare the last checkpoint's log-probabilities with those of transformers on the exported folder."""
        from transformers import AutoModelForCausalLM  # it takes seconds to import

        expected, rows = self._plain["logprobs"], self.ran.calls[-1][0].whole
        load: Any = AutoModelForCausalLM.from_pretrained  # pyright: ignore[reportUnknownMemberType]
        folder = str(self.ran.folder / EXPORTED)
        model: Any = load(folder, dtype=torch.float32, attn_implementation="eager")
        ids, lengths = rows["input_ids"], rows["input_lengths"]
        with torch.no_grad():
            sampling = SamplingParams(*self.ran.config.logprob_sampling)
            logits = filter_logits(model(ids).logits.flatten(0, 1), sampling).view(*ids.shape, -1)
            every = at_temperature(logits, sampling.temperature).log_softmax(-1)
        # [B, S] as `get_logprobs` returns them: column 0 and right padding are 0.
        theirs = every[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
        theirs = torch.nn.functional.pad(theirs, (1, 0))
        theirs = theirs.masked_fill(torch.arange(ids.shape[1]) >= lengths.unsqueeze(1), 0.0)
        # Both are -inf outside the filters.
        found = float((expected - theirs).where(expected != theirs, 0.0).abs().max())
        if not found <= TRANSFORMERS:
            raise Found(f"a token differs by {found:.2g} nats; the tolerance is {TRANSFORMERS:g}")
        return f"{int(lengths.sum())} tokens within {found:.1e} nats (tolerance {TRANSFORMERS:g})"


def critic_on_one_rank(ran: Ran) -> str:
    """Train the critic's last step on one rank; compare weights, loss and gradient norm. Raises Refused and Found."""
    require_comparable(ran, on_several_ranks=True)
    plan = ran.on_one_rank().models["value"]
    with one_rank(plan.policy, role=plan.role) as one:
        after, before = one.load(ran.step(2)), one.load(ran.step(1))
        require_movement(before, after, REORDERED)
        for call, result in zip(ran.critic_calls[-1], one.train(ran.critic_calls[-1]), strict=True):
            require_close(call.result, result)
        return within(after, one.call("tensors"), REORDERED)
