"""From NeMo RL's other backend of a policy, DTensor, to Megatron."""

from collections.abc import Callable, Mapping
from typing import cast

from nemo_rl_mcore.config.base import Tree
from nemo_rl_mcore.config.migration.draft import Draft

_DTENSOR = "policy.dtensor_cfg"
_MEGATRON = "policy.megatron_cfg"
_LAYOUT = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "activation_checkpointing": "activation_checkpointing",
}
_OPTIMIZER: dict[str, Callable[[Mapping[str, object]], object]] = {
    "lr": lambda kwargs: kwargs.get("lr"),
    "min_lr": lambda kwargs: kwargs.get("lr"),  # the schedule says if it is another
    "weight_decay": lambda kwargs: kwargs.get("weight_decay"),
    "adam_beta1": lambda kwargs: _of_pair(kwargs.get("betas"), 0),
    "adam_beta2": lambda kwargs: _of_pair(kwargs.get("betas"), 1),
    "adam_eps": lambda kwargs: kwargs.get("eps"),
}


def use_megatron(draft: Draft) -> None:
    """Say in the keys of Megatron what a recipe asks of DTensor, if it does."""
    if not draft.get(f"{_DTENSOR}.enabled"):
        return
    draft.change(f"{_MEGATRON}.enabled", True, "Megatron takes the place of DTensor, the only backend here")
    for theirs, ours in _LAYOUT.items():
        _take(draft, f"{_MEGATRON}.{ours}", draft.get(f"{_DTENSOR}.{theirs}"), f"{_DTENSOR}.{theirs}")
    if draft.get(f"{_DTENSOR}.lora_cfg.enabled"):
        draft.refuse(f"{_DTENSOR}.lora_cfg", {"enabled": True}, "remove it; all weights are trained")
    draft.set(f"{_DTENSOR}.enabled", False)
    _use_optimizer(draft)


def _use_optimizer(draft: Draft) -> None:
    given = draft.section("policy.optimizer")
    if not str(given.get("name", "")).endswith(("AdamW", "FusedAdam")):  # whose weight decay is decoupled
        if given:
            draft.refuse("policy.optimizer", given, f"set {_MEGATRON}.optimizer: adam or sgd")
        return
    kwargs = draft.section("policy.optimizer.kwargs")
    for key, of in _OPTIMIZER.items():
        _take(draft, f"{_MEGATRON}.optimizer.{key}", of(kwargs), "policy.optimizer")
    # They are copies of the optimizer's there, which has just got other values.
    draft.dropped += [f"{_MEGATRON}.scheduler.{key}" for key in draft.section(f"{_MEGATRON}.scheduler")]
    draft.set(f"{_MEGATRON}.scheduler", {"lr_decay_style": "constant"})
    _use_schedule(draft, cast("float", kwargs.get("lr", 0.0)))


def _use_schedule(draft: Draft, lr: float) -> None:
    """A linear warm-up and a constant rate is what the exemplars have; another schedule is refused."""
    given = draft.get("policy.scheduler")
    single = draft.section("policy.scheduler")
    steps = cast("list[Tree]", [single] if single else given or [])
    # What is left out has torch's defaults.
    for step in steps:
        name = str(step.get("name", "")).rpartition(".")[2]
        kwargs = cast("Tree", step.get("kwargs") or {})
        match name:
            case "LinearLR" if kwargs.get("end_factor", 1.0) == 1.0:
                start = cast("float", kwargs.get("start_factor", 1 / 3))
                place = f"{_MEGATRON}.scheduler"
                _take(draft, f"{place}.lr_warmup_iters", kwargs.get("total_iters", 5), "policy.scheduler")
                _take(draft, f"{place}.lr_warmup_init", float(f"{start * lr:.6g}"), "policy.scheduler")
            case "ConstantLR" if kwargs.get("factor", 1 / 3) == 1.0:
                continue
            case "" if "milestones" in step:
                continue
            case _:
                draft.refuse("policy.scheduler", given, f"set {_MEGATRON}.scheduler; its warm-up is linear")
                return


def _take(draft: Draft, target: str, value: object, source: str) -> None:
    if value is not None and value != draft.get(target):
        draft.change(target, value, f"as {source} says, which this recipe reads")


def _of_pair(pair: object, place: int) -> object:
    both = cast("list[object]", pair) if isinstance(pair, list) else []
    return both[place] if place < len(both) else None
