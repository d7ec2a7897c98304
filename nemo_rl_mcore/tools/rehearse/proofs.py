"""Proofs about a run: each compares two ways to the same numbers, within docs/numerics.md.

One of them is mostly the same step on one rank in this process, from the run's checkpoint, over its ranks' rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from nemo_rl_mcore.config import ClusterConfig, PolicyConfig, Role
from nemo_rl_mcore.config.algorithm import DPOConfig
from nemo_rl_mcore.config.base import Tree
from nemo_rl_mcore.config.master import GRPOMasterConfig, PPOMasterConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.driver.actors.one_process import InProcessRank, OneProcess
from nemo_rl_mcore.driver.algorithms.mismatch import policy_loss
from nemo_rl_mcore.losses.answers import DPOLossFn
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.losses.custom import make_loss
from nemo_rl_mcore.models import missing_family
from nemo_rl_mcore.rank.worker import MegatronPolicyWorker
from nemo_rl_mcore.tools.check.given_weights import ONE_RANK
from nemo_rl_mcore.tools.migrate.draft import put
from nemo_rl_mcore.tools.rehearse.runs import EXPORTED, KILLED, SPLIT, Ran, Row, TrainCall
from nemo_rl_mcore.tools.rehearse.schedule import Schedule

# Parameters after up to three Adam steps at lr 1e-2, when the same sums were added in another order. Adam divides each
# gradient by its own size, so the rounding of a tiny gradient reaches its weight in full.
REORDERED = 5e-6
# Parameters after five such steps, when another algorithm computed the log-probabilities.
FIVE_STEPS = 1e-5
# Generation's own log-probabilities against those of get_logprobs.
GENERATION = 1e-4
# The split step against train, over the same microbatches: parameters after three Adam steps.
SPLIT_STEP = 1e-6
# Log-probabilities beside those of transformers.
TRANSFORMERS = 1e-4
# Metrics of a step.
METRICS = {"rel": 1e-4, "abs": 1e-5}
# The learning rate of a step against the recipe's, a share of it.
LEARNING_RATE = 1e-9


_MOVED = 50
"""Tolerances that a step has to move some weight by, so that its results can be compared."""

# A step on one rank

Tensors = Mapping[str, torch.Tensor]


class _Readable(MegatronPolicyWorker):
    """A rank whose weights can be read."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of all weights: a policy's by their Hugging Face names, a critic's by Megatron's."""
        if self.role is Role.POLICY:
            return {name: tensor.detach().clone() for name, tensor in self.backend.full_tensors()}
        return {name: parameter.detach().clone() for name, parameter in self._parameters().items()}

    def states(self) -> dict[str, torch.Tensor]:
        """Return copies of all weights, by Megatron's names, and of their optimizer states."""
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
        # Megatron takes seconds to import, and recipes are shrunk without it.
        from nemo_rl_mcore.rank.megatron.model_class import language_models
        from nemo_rl_mcore.rank.megatron.optimizer_state import gather_parameters

        chunks = cast("Any", self.backend).chunks
        gather_parameters(chunks)
        return {
            name: parameter
            for model in language_models(chunks)
            for name, parameter in model.named_parameters()
        }


class OneRank:
    """A model of a recipe on one rank; made by `one_rank`."""

    def __init__(self, group: InProcessRank, name: str) -> None:
        self._group, self._name = group, name

    def call(self, method: str, **arguments: Any) -> Any:
        return self._group.run_all(method, **arguments)[0]

    def load(self, checkpoint: Path, read: str = "tensors") -> Tensors:
        """Set weights, optimizer and schedule to those of a folder step_N, and read the weights, or all `states`."""
        self.call("load_checkpoint", folder=str((checkpoint / self._name).absolute()))
        return self.call(read)

    def train(self, calls: Sequence[TrainCall], loss_fn: LossFunction | None = None) -> list[dict[str, Any]]:
        """Train as the run did, each call whole; loss_fn: in place of its own."""
        return [
            self.call("train", data=call.whole, loss_fn=loss_fn or call.loss_fn, gbs=call.gbs, mbs=call.mbs)
            for call in calls
        ]


@contextmanager
def one_rank(
    policy: PolicyConfig,
    *,
    seed: int = 42,
    temperature: float = 1.0,
    trained: bool = True,
    role: Role = Role.POLICY,
) -> Generator[OneRank]:
    """Start a model on one rank in this process; temperature: divides the logits. trained: it has an optimizer."""
    with OneProcess(ClusterConfig()) as place:
        options = {"seed": seed, "temperature": temperature, "trained": trained, "role": role}
        options["init_reference_model"] = False
        group = InProcessRank(_Readable, place, (policy,), options, deadline_keys="policy", name="one")
        try:
            yield OneRank(group, role.value)
        finally:
            group.shutdown()


def make_teacher(tree: Tree, folder: Path) -> None:
    """Write random weights of the architecture of a recipe's policy as a Hugging Face folder."""
    alone: Tree = {"policy": copy.deepcopy(tree["policy"])}
    for path, value in ONE_RANK.items():
        if path.startswith("policy."):
            put(alone, path, value)
    with one_rank(PolicyConfig.model_validate(alone["policy"]), seed=7, trained=False) as one:
        one.call("export_hf", folder=str(folder))


# Comparisons


class Refused(Exception):
    """A reason why something is not proven: the recipe has no such thing, or it cannot be compared."""


class Found(Exception):
    """A difference where there must be none."""


def difference(left: Tensors, right: Tensors) -> float:
    """Return the largest difference of two models, relative to a weight's largest entry or to 1; inf for other names.

    A number that is not finite in one of them alone is infinitely far from the other's.
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
    """Raise Refused for a step after which most weights would pass for those before it."""
    moved = difference(before, after)
    if moved < _MOVED * tolerance:
        raise Refused(f"the step moved no weight by more than {moved:.1e}, which is too little to compare")


def require_several_ranks(ranks: int) -> None:
    if ranks == 1:
        raise Refused("the recipe has one rank")


def require_comparable_balance(config: RunConfig) -> None:
    """Raise Refused for a model whose loss depends on which rows share a microbatch."""
    model = config.policy.model
    if model.load_balancing_loss and model.moe_router_load_balancing_type == "aux_loss":
        raise Refused(
            "aux_loss balances a microbatch, and one rank has others (seq_aux_loss can be compared)"
        )


def require_same_results(calls: Sequence[TrainCall], results: Sequence[Mapping[str, Any]]) -> None:
    """Compare loss and gradient norm of each call with those of one rank; raises Found."""
    for call, result in zip(calls, results, strict=True):
        for name in ("global_loss", "grad_norm"):
            require_close(name, call.result[name], result[name])


def within(left: Tensors, right: Tensors, tolerance: float) -> str:
    """Compare all weights of two models; raises Found."""
    found = difference(left, right)
    if found > tolerance:
        raise Found(f"a weight differs by {found:.2g}, and {tolerance:g} is allowed")
    return f"weights within {found:.1e} of {tolerance:g}"


def require_equal(left: Tensors, right: Tensors, what: str) -> None:
    """Compare all weights of two models bit by bit; raises Found, naming one."""
    if difference(left, right):
        names = [name for name in left if name not in right or not left[name].equal(right[name])]
        raise Found(f"{what}: {names[0] if names else 'names'} differs, of {len(names)}")


def require_close(name: str, expected: Any, found: Any, where: str = "on one rank") -> None:
    """Compare the numbers of a metric, within its tolerance; raises Found."""
    for left, right in zip(expected.flatten().tolist(), found.flatten().tolist(), strict=True):
        if not math.isclose(left, right, rel_tol=METRICS["rel"], abs_tol=METRICS["abs"]):
            raise Found(f"{name} is {left:.6g}, and {right:.6g} {where}")


# Proofs

_OF_THE_MACHINE = ("timing/", "performance/", "async/")


def learning_rates(ran: Ran, schedule: Schedule, factor: float) -> str:
    """Compare the learning rate of each step with the schedule's closed form; factor: that of the rehearsal."""
    steps = sum(len(call.result["skip_reasons"]) for call in ran.calls[0])
    if not steps:
        raise Refused("the first step trained on nothing")
    for number, row in enumerate(ran.rows):
        expected = factor * schedule.rate(number * steps + steps - 1)
        if not math.isclose(row["train/lr"], expected, rel_tol=LEARNING_RATE, abs_tol=1e-15):
            raise Found(
                f"step {number + 1}: {row['train/lr'] / factor:.6g}, and {expected / factor:.6g} by the recipe"
            )
    rates = ", ".join(f"{row['train/lr'] / factor:.4g}" for row in ran.rows)
    return f"{rates} after {steps} optimizer step{'s' * (steps > 1)} each"


def resumed(ran: Ran, rows: Sequence[Row]) -> str:
    """Compare the last step of a run that resumed from a copy with the run's own, bit by bit.

    Compared are its metrics, and each model's saved weights and optimizer states.
    """
    if ran.config.max_age:
        raise Refused(
            "which weights sample what in an asynchronous run depends on time; see layout = one rank"
        )
    before, after = ran.rows[-1], rows[-1]
    names = [name for name in before if not name.startswith(_OF_THE_MACHINE) and name in after]
    none = [name for name in names if math.isnan(before[name]) and math.isnan(after[name])]
    wrong = [name for name in names if before[name] != after[name] and name not in none]
    if wrong:
        name = wrong[0]
        raise Found(
            f"{name} is {after[name]:.8g}, and {before[name]:.8g} undisturbed; {len(wrong)} metrics differ"
        )
    if not ran.step(2, KILLED).is_dir():
        raise Found("the resumed run saved nothing")
    tensors = 0
    for plan in ran.on_one_rank().models.values():
        if not plan.trained:
            continue
        with one_rank(plan.policy, role=plan.role) as one:
            saved, resumed = one.load(ran.step(2), "states"), one.load(ran.step(2, KILLED), "states")
        require_equal(saved, resumed, f"{plan.name}: what is saved after the resumed step")
        tensors += len(saved)
    return f"{len(names)} metrics equal, {tensors} tensors of weights and optimizers equal bit by bit"


def sampled(ran: Ran) -> str:
    """Compare the log-probabilities of sampling with those of training, by the response that differs most."""
    name = "mismatch/max_seq_mult_prob_error"
    found = [math.log(row[name]) for row in ran.rows if name in row]
    if not found:
        raise Refused("the answers are given, not sampled")
    if max(found) > GENERATION:
        step = found.index(max(found)) + 1
        raise Found(f"step {step}: a response differs by {max(found):.2g} nats a token")
    return f"{max(found):.1e} nats a token at most"


@dataclass
class Twins:
    """A run's last step once more, on one rank, from the checkpoint before it; each method is a proof."""

    ran: Ran

    @cached_property
    def _plain(self) -> dict[str, Any]:
        """The weights before and after the step as they were saved, and after it on one rank; digests."""
        if reason := missing_family(self.ran.config.policy.model):
            raise Refused(reason)  # weights are read by their names there
        calls, found = self.ran.calls[-1], dict[str, Any]()
        with self._one_rank() as one:
            for step in (1, 2):
                found[f"saved {step}"] = one.load(self.ran.step(step))
                found[f"digest {step}"] = one.call("weights_digest")
            found["logprobs"] = one.call("get_logprobs", data=calls[0].whole)["logprobs"]
            one.load(self.ran.step(1))
            found["results"] = one.train(calls)
            found["train"] = one.call("tensors")
            one.load(self.ran.step(1))
            for call in calls:
                for method, given in call.split_calls(self.ran.on_one_rank().policy):
                    one.call(method, **given)
            found["split"] = one.call("tensors")
            found["split on all"] = one.load(self.ran.folder / SPLIT)
        return found

    def _one_rank(self, *, trained: bool = True, **changes: object) -> AbstractContextManager[OneRank]:
        """Start the policy; changes: its keys, with __ for the dots."""
        policy, temperature = self.ran.on_one_rank(**changes).policy, self.ran.config.logprob_temperature
        return one_rank(policy, temperature=temperature, trained=trained)

    def _require_movement(self, tolerance: float) -> None:
        require_movement(self._plain["saved 1"], self._plain["saved 2"], tolerance)

    def layout(self) -> str:
        """Compare the step of all ranks with that of one."""
        require_several_ranks(self.ran.layout.ranks)
        require_comparable_balance(self.ran.config)
        self._require_movement(REORDERED)
        require_same_results(self.ran.calls[-1], self._plain["results"])
        return within(self._plain["saved 2"], self._plain["train"], REORDERED)

    def split(self) -> str:
        """Compare the split step with `train`, on one rank and on all."""
        self._require_movement(REORDERED)
        alone = within(self._plain["train"], self._plain["split"], REORDERED)
        if self.ran.layout.ranks == 1:
            return alone
        on_all = difference(self._plain["saved 2"], self._plain["split on all"])
        if on_all > REORDERED:
            ranks = self.ran.layout.ranks
            raise Found(f"a weight differs by {on_all:.2g} on {ranks} ranks, {REORDERED:g} is allowed")
        return f"{alone}; on all ranks {on_all:.1e}"

    def masked(self) -> str:
        """Compare the step with one whose numbers per token are others wherever the masks say that none counts."""
        self._require_movement(REORDERED)
        plain = self.ran.calls[-1]
        changed = [call.with_noise() for call in plain]
        if all(call is None for call in changed):
            raise Refused("no policy gradient, or every token counts")
        with self._one_rank() as one:
            one.load(self.ran.step(1))
            noisy = one.train([noisy or call for noisy, call in zip(changed, plain, strict=True)])
            for expected, found in zip(self._plain["results"], noisy, strict=True):
                losses = expected["global_loss"], found["global_loss"]
                require_close("global_loss", *losses, "with other numbers there")
            return within(self._plain["train"], one.call("tensors"), REORDERED)

    def refits(self) -> str:
        """Compare the digest of the weights that engines received last with a checkpoint's, read on one rank."""
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
        config, key = self.ran.config, "use_fused_linear_logprobs"
        if not getattr(config.policy.megatron_cfg, key):
            raise Refused("the recipe has them unfused")
        off = (key, "fused_linear_logprobs_packed", "fused_linear_logprobs_context_parallel")
        changes = {f"megatron_cfg__{name}": False for name in off}
        unfused, loss = self.ran.on_one_rank(**changes), None
        if isinstance(unfused, GRPOMasterConfig | PPOMasterConfig):
            loss = policy_loss(unfused)
        elif (section := config.losses.get("loss_fn")) is not None:
            loss = make_loss(section)
        elif isinstance(config.loop, DPOConfig):
            loss = DPOLossFn(config.loop.loss)
        return self._beside(changes, FIVE_STEPS, loss)

    def packed(self) -> str:
        """Compare rows that share rows, or have a token budget, with padded ones."""
        policy = self.ran.config.policy
        if not policy.sequence_packing.enabled and not policy.dynamic_batching.enabled:
            raise Refused("the recipe pads")
        require_comparable_balance(self.ran.config)
        padded = {"sequence_packing__enabled": False, "dynamic_batching__enabled": False}
        padded["megatron_cfg__fused_linear_logprobs_packed"] = False
        return self._beside(padded, REORDERED)

    def _beside(
        self, changes: Mapping[str, bool], tolerance: float, loss_fn: LossFunction | None = None
    ) -> str:
        self._require_movement(tolerance)
        with self._one_rank(**changes) as one:
            one.load(self.ran.step(1))
            one.train(self.ran.calls[-1], loss_fn)
            return within(self._plain["train"], one.call("tensors"), tolerance)

    def exported(self) -> str:
        """Compare the exported weights, read again, with the checkpoint, bit by bit."""
        saved, exported = self._plain["saved 2"], str(self.ran.folder / EXPORTED)
        with self._one_rank(trained=False, model_name=exported, model=None) as one:
            require_equal(saved, one.call("tensors"), "weights that were exported")
        return f"{len(saved)} tensors equal bit by bit"

    def transformers(self) -> str:
        """Compare log-probabilities of the last checkpoint with those of transformers from the exported folder."""
        from transformers import AutoModelForCausalLM  # it takes seconds to import

        expected, rows = self._plain["logprobs"], self.ran.calls[-1][0].whole
        load: Any = AutoModelForCausalLM.from_pretrained  # pyright: ignore[reportUnknownMemberType]
        folder = str(self.ran.folder / EXPORTED)
        model: Any = load(folder, dtype=torch.float32, attn_implementation="eager")
        ids, lengths = rows["input_ids"], rows["input_lengths"]
        with torch.no_grad():
            every: torch.Tensor = (model(ids).logits / self.ran.config.logprob_temperature).log_softmax(-1)
        # In the form of `get_logprobs`, [B, S]: column 0 and right padding are 0.
        theirs = every[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
        theirs = torch.nn.functional.pad(theirs, (1, 0))
        theirs = theirs.masked_fill(torch.arange(ids.shape[1]) >= lengths.unsqueeze(1), 0.0)
        found = float((expected - theirs).abs().max())
        if not found <= TRANSFORMERS:
            raise Found(f"a token differs by {found:.2g} nats, and {TRANSFORMERS:g} is allowed")
        return f"{int(lengths.sum())} tokens within {found:.1e} of {TRANSFORMERS:g} nats"


def critic_on_one_rank(ran: Ran) -> str:
    """Train the critic's last step on one rank; compare weights, loss and gradient norm. Raises Refused and Found."""
    require_several_ranks(ran.layout.ranks)
    require_comparable_balance(ran.config)
    plan = ran.on_one_rank().models["value"]
    with one_rank(plan.policy, role=plan.role) as one:
        after, before = one.load(ran.step(2)), one.load(ran.step(1))
        require_movement(before, after, REORDERED)
        require_same_results(ran.critic_calls[-1], one.train(ran.critic_calls[-1]))
        return within(after, one.call("tensors"), REORDERED)
