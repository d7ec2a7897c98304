"""From NeMo RL's other backend of a policy, DTensor, to Megatron."""

from collections.abc import Callable, Mapping
from typing import TypeGuard, cast

from nemo_rl_mcore.config.base import Tree
from nemo_rl_mcore.recipe.foreign.judgement import shown
from nemo_rl_mcore.tools.migrate.draft import Draft, Kind, Note

_DTENSOR = "policy.dtensor_cfg"
_MEGATRON = "policy.megatron_cfg"
_LAYOUT = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "activation_checkpointing": "activation_checkpointing",
    "expert_parallel_size": "expert_model_parallel_size",
}
_WITHOUT_A_TWIN: dict[str, tuple[tuple[object, ...], str]] = {
    "cpu_offload": ((None, False), "it costs memory; policy.offload takes what is idle off the GPU"),
    "dp_replicate_size": ((None, 1), "data-parallel ranks share one set of gradients"),
    "custom_parallel_plan": ((None,), "Megatron's layers are cut in the one way that they have"),
}
"""Keys of a layout: their neutral values, and what holds here for any other one."""
_TORCH: Mapping[str, object] = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
"""What torch.optim.AdamW takes where an argument is left out."""
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
    for key, (neutral, what) in _WITHOUT_A_TWIN.items():
        value = draft.get(f"{_DTENSOR}.{key}")
        if value not in neutral:
            draft.notes.append(
                Note(Kind.WARNED, f"{_DTENSOR}.{key}", f"{shown(value)} has no effect here; {what}")
            )
    draft.set(f"{_DTENSOR}.enabled", False)
    _clip_as_dtensor(draft)
    _take(
        draft,
        f"{_MEGATRON}.distributed_data_parallel_config.grad_reduce_in_fp32",
        True,
        "DTensor, whose gradients are reduced in fp32,",
    )
    _use_optimizer(draft)


def _clip_as_dtensor(draft: Draft) -> None:
    """Leave out Megatron's norm, which DTensor does not read; null is no clipping there."""
    if draft.get("policy.max_grad_norm") is None:
        draft.change("policy.max_grad_norm", 0.0, "DTensor clips no gradient where it is null, or left out")
    path = f"{_MEGATRON}.optimizer.clip_grad"
    if draft.has(path):
        draft.pop(path)
        draft.dropped.append(path)


def clip_as_read(draft: Draft) -> None:
    """Take the norm that Megatron's optimizer reads, clip_grad, for max_grad_norm, which is DTensor's alone."""
    for name in ("policy", "value"):
        path, read = f"{name}.max_grad_norm", f"{name}.megatron_cfg.optimizer.clip_grad"
        norm = draft.get(read)
        if norm is None or not draft.has(path) or draft.get(path) == norm:
            continue
        draft.change(path, norm, "Megatron's optimizer reads megatron_cfg.optimizer.clip_grad alone")
        draft.pop(read)


def _use_optimizer(draft: Draft) -> None:
    given = draft.section("policy.optimizer")
    if not str(given.get("name", "")).endswith(("AdamW", "FusedAdam")):  # whose weight decay is decoupled
        if given:
            draft.refuse("policy.optimizer", given, f"set {_MEGATRON}.optimizer: adam or sgd")
        return
    kwargs = {**_TORCH, **draft.section("policy.optimizer.kwargs")}
    if not _is_number(kwargs["lr"]):
        draft.refuse(
            "policy.optimizer.kwargs.lr", kwargs["lr"], f"set {_MEGATRON}.optimizer.lr", "is no number"
        )
    if kwargs["weight_decay"]:
        draft.change(
            f"{_MEGATRON}.optimizer.decay_norms_and_biases", True, "torch decays norms and biases too"
        )
    for key, of in _OPTIMIZER.items():
        _take(draft, f"{_MEGATRON}.optimizer.{key}", of(kwargs), "policy.optimizer")
    # They are copies of the optimizer's there, which has just got other values.
    draft.dropped += [f"{_MEGATRON}.scheduler.{key}" for key in draft.section(f"{_MEGATRON}.scheduler")]
    draft.set(f"{_MEGATRON}.scheduler", {"lr_decay_style": "constant"})
    _use_schedule(draft, kwargs["lr"])


def _use_schedule(draft: Draft, lr: object) -> None:
    """Migrate a linear warm-up with a constant rate, as the exemplars have it; refuse any other schedule."""
    given = draft.get("policy.scheduler")
    single = [given] if given else []
    steps = cast("list[Tree]", given if isinstance(given, list) else single)
    if not all(_is_step(step) for step in steps):
        draft.refuse(
            "policy.scheduler", draft.get("policy.scheduler"), f"set {_MEGATRON}.scheduler", "is no schedule"
        )
        return
    # What is left out has torch's defaults.
    for step in steps:
        name = str(step.get("name", "")).rpartition(".")[2]
        kwargs = cast("Tree", step.get("kwargs") or {})
        match name:
            case "LinearLR" if kwargs.get("end_factor", 1.0) == 1.0:
                start = kwargs.get("start_factor", 1 / 3)
                place = f"{_MEGATRON}.scheduler"
                _take(draft, f"{place}.lr_warmup_iters", kwargs.get("total_iters", 5), "policy.scheduler")
                if _is_number(lr) and _is_number(start):
                    init = float(f"{start * lr:.6g}")
                    _take(draft, f"{place}.lr_warmup_init", init, "policy.scheduler")
            case "ConstantLR" if kwargs.get("factor", 1 / 3) == 1.0:
                continue
            case "" if "milestones" in step:
                continue
            case _:
                draft.refuse(
                    "policy.scheduler",
                    draft.get("policy.scheduler"),
                    f"set {_MEGATRON}.scheduler; its warm-up is linear",
                )
                return


def _is_step(step: object) -> bool:
    return isinstance(step, dict) and isinstance(cast("Tree", step).get("kwargs"), dict | None)


def _take(draft: Draft, target: str, value: object, source: str) -> None:
    if value is not None and value != draft.get(target):
        draft.change(target, value, f"as {source} says, which this recipe reads")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _of_pair(pair: object, place: int) -> object:
    both = cast("list[object]", pair) if isinstance(pair, list) else []
    return both[place] if place < len(both) else None
