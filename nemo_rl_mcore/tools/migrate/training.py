"""NeMo RL's keys of training, models and layouts whose meaning, or absence, differs here."""

from typing import TypeGuard, cast

from nemo_rl_mcore.config.base import Tree, value_at
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.models.pretrained import OVERRIDES
from nemo_rl_mcore.recipe.validate import with_pretrained_model
from nemo_rl_mcore.tools.migrate.draft import KEYS, Draft, Kind, shown
from nemo_rl_mcore.tools.migrate.judgements import judge

_DTENSOR = "policy.dtensor_cfg"
_MEGATRON = "policy.megatron_cfg"
_DDP = f"{_MEGATRON}.distributed_data_parallel_config"

# DTensor, NeMo RL's other policy backend


def use_megatron(draft: Draft) -> None:
    """Translate DTensor's keys into Megatron's if the recipe uses DTensor.

    A torch optimizer carries over only if its weight decay is decoupled.
    """
    if not draft.get(f"{_DTENSOR}.enabled"):
        return
    draft.change(f"{_MEGATRON}.enabled", True, "Megatron, the only backend here, replaces DTensor")
    section = draft.section(_DTENSOR)
    for theirs, ours in KEYS["dtensor"].items():
        _take(draft, f"{_MEGATRON}.{ours}", section.get(theirs), f"from {_DTENSOR}.{theirs}")
    for key, value in [*section.items()]:
        judge(draft, f"{_DTENSOR}.{key}", value, section, draft.tree)
    draft.set(f"{_DTENSOR}.enabled", False)
    if draft.get("policy.max_grad_norm") is None:
        draft.change("policy.max_grad_norm", 0.0, "DTensor does not clip gradients if it is null or missing")
    draft.drop(f"{_MEGATRON}.optimizer.clip_grad")  # which DTensor does not read
    _take(draft, f"{_DDP}.grad_reduce_in_fp32", True, "DTensor reduces gradients in fp32")
    given = draft.section("policy.optimizer")
    if not given:
        return
    if not str(given.get("name", "")).endswith(("AdamW", "FusedAdam")):
        draft.refuse("policy.optimizer", given, f"set {_MEGATRON}.optimizer, which is AdamW")
        return
    kwargs = {**KEYS["adamw"], **draft.section("policy.optimizer.kwargs")}
    lr, betas = kwargs["lr"], kwargs["betas"]
    if not _is_number(lr):
        draft.refuse("policy.optimizer.kwargs.lr", lr, f"set {_MEGATRON}.optimizer.lr", "is not a number")
    if kwargs["weight_decay"]:
        why = "torch decays norms and biases too"
        draft.change(f"{_MEGATRON}.optimizer.decay_norms_and_biases", True, why)
    beta1, beta2, *_ = [*(cast("list[object]", betas) if isinstance(betas, list) else []), None, None]
    taken = {"lr": lr, "min_lr": lr, "weight_decay": kwargs["weight_decay"]}  # a schedule may lower min_lr
    taken |= {"adam_beta1": beta1, "adam_beta2": beta2, "adam_eps": kwargs["eps"]}
    for key, value in taken.items():
        _take(draft, f"{_MEGATRON}.optimizer.{key}", value, "from policy.optimizer")
    # These are copies of the optimizer's values, which have just changed.
    draft.dropped += [f"{_MEGATRON}.scheduler.{key}" for key in draft.section(f"{_MEGATRON}.scheduler")]
    draft.set(f"{_MEGATRON}.scheduler", {"lr_decay_style": "constant"})
    _use_warmup(draft, lr)


def _use_warmup(draft: Draft, lr: object) -> None:
    """Migrate a linear warm-up to a constant rate, as in NeMo RL's exemplars; refuse any other schedule.

    Missing arguments have torch's defaults.
    """
    path, place = "policy.scheduler", f"{_MEGATRON}.scheduler"
    given = draft.get(path)
    steps = cast("list[object]", given if isinstance(given, list) else [given] if given else [])
    schedules = [cast("Tree", one) for one in steps if isinstance(one, dict)]
    of_sections = all(isinstance(one.get("kwargs"), dict | None) for one in schedules)
    if len(schedules) < len(steps) or not of_sections:
        draft.refuse(path, draft.get(path), f"set {place}", "is not a schedule")
        return
    for step in schedules:
        kwargs = cast("Tree", step.get("kwargs") or {})
        match str(step.get("name", "")).rpartition(".")[2]:
            case "LinearLR" if kwargs.get("end_factor", 1.0) == 1.0:
                start = kwargs.get("start_factor", 1 / 3)
                _take(draft, f"{place}.lr_warmup_iters", kwargs.get("total_iters", 5), f"from {path}")
                if _is_number(lr) and _is_number(start):
                    _take(draft, f"{place}.lr_warmup_init", float(f"{start * lr:.6g}"), f"from {path}")
            case "ConstantLR" if kwargs.get("factor", 1 / 3) == 1.0:
                continue
            case "" if "milestones" in step:
                continue
            case _:
                draft.refuse(path, draft.get(path), f"set {place}, whose warm-up is linear")
                return


def _take(draft: Draft, target: str, value: object, why: str) -> None:
    if value is not None and value != draft.get(target):
        draft.change(target, value, why)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Optimizer and schedule


def clip_as_read(draft: Draft) -> None:
    """Move clip_grad, which NeMo RL's Megatron reads, to max_grad_norm, which only DTensor reads there."""
    for name in ("policy", "value"):
        path, read = f"{name}.max_grad_norm", f"{name}.megatron_cfg.optimizer.clip_grad"
        norm = draft.get(read)
        if norm is None or norm == draft.get(path):
            draft.drop(read)
        elif draft.has(path):
            draft.change(path, norm, "NeMo RL's Megatron reads only megatron_cfg.optimizer.clip_grad")
            draft.drop(read)
        else:
            draft.rename(read, path)


def follow_schedules(draft: Draft) -> None:
    """Multiply a schedule's iterations by the optimizer steps per rollout, so that each rollout keeps its rate.

    NeMo RL advances its schedule once per `train` call ("Step LR scheduler once per train() call" in
    megatron_policy_worker.py), this package once per optimizer step. A call trains a whole rollout, or one of its
    `ppo_epochs`, in steps of policy.train_global_batch_size. The schedule's weight decay overrides the optimizer's
    there: if constant, it becomes the optimizer's here; if it changes over the run, it is refused.
    """
    loop, batch = draft.algorithm, draft.number("policy.train_global_batch_size")
    prompts = draft.number(f"{loop}.num_prompts_per_step")
    answers = draft.number(f"{loop}.num_generations_per_prompt")
    steps = 1  # without rollouts, or with numbers that `check` refuses
    if prompts and answers and batch and batch > 0:
        steps = max(1, prompts * answers // batch)
    for section in ("policy.megatron_cfg.scheduler", "value.megatron_cfg.scheduler", "value.scheduler"):
        for key in ("lr_warmup_iters", "lr_decay_iters"):
            iterations = draft.number(f"{section}.{key}")
            if iterations and steps > 1:
                why = f"a rollout's {steps} optimizer steps count singly here, and as one in NeMo RL"
                draft.change(f"{section}.{key}", iterations * steps, why)
    for model in ("policy.megatron_cfg", "value.megatron_cfg", "value"):
        decay, ends = f"{model}.optimizer.weight_decay", ("start_weight_decay", "end_weight_decay")
        paths = [path for end in ends if draft.has(path := f"{model}.scheduler.{end}")]
        first, *others = [draft.get(path) for path in paths] or [None]
        if any(other != first for other in others):
            for path in paths:
                draft.refuse(path, draft.get(path), f"set {decay}, which holds for all steps")
            continue
        if first is not None and draft.get(decay) != first:
            draft.change(decay, first, "the schedule's, which overrides the optimizer's in NeMo RL")
        for path in paths:
            draft.drop(path)


# Model


def read_overrides(draft: Draft) -> None:
    """Drop override sections that change nothing; the critic is the policy's model and needs the same overrides.

    Sequences may exceed the positions in config.json: rotary embeddings continue beyond them.
    """
    given = draft.section(f"value.{OVERRIDES}")
    if draft.section("value") and given != draft.section(f"policy.{OVERRIDES}"):
        draft.refuse(
            f"value.{OVERRIDES}", given, "give policy and value the same", "differs from the policy's"
        )
    for name in ("policy", "value", "teacher"):
        if name == "value" or not draft.section(f"{name}.{OVERRIDES}"):
            draft.drop(f"{name}.{OVERRIDES}")
    total = draft.number("policy.max_total_sequence_length")
    filled, _ = with_pretrained_model(draft.tree)
    for name in ("policy", "teacher"):
        try:
            longest = ModelConfig.model_validate(value_at(filled, f"{name}.model")).shape.longest_sequence
        except ValueError:  # which `check` reports
            continue
        if total is not None and total > longest:
            why = f"NeMo RL trains on {total} tokens, beyond the model's {longest} positions"
            draft.change(f"{name}.{OVERRIDES}.max_position_embeddings", total, why)


def read_prediction_layers(draft: Draft) -> None:
    """Move prediction layers and their loss factor to the model; without layers, drop the keys."""
    layers = f"{_MEGATRON}.mtp_num_layers"
    if not draft.has(layers):
        return  # the model keeps its own, if any
    detached = draft.get(f"{_MEGATRON}.mtp_detach_heads") is True
    if detached and draft.get(layers) not in (None, 0):
        why = "left out; detached from the model, they only draft tokens for engines, and count in the gradient's norm"
        draft.note(Kind.CHANGED, layers, why)
    if detached or draft.get(layers) in (None, 0):
        for key in ("num_layers", "loss_scaling_factor", "use_repeated_layer", "detach_heads"):
            draft.drop(f"{_MEGATRON}.mtp_{key}")
        return
    filled, _ = with_pretrained_model(draft.tree)  # the keys need the model's sizes beside them
    if draft.number(layers) is not None and value_at(filled, "policy.model.num_layers") is not None:
        for key in ("mtp_num_layers", "mtp_loss_scaling_factor"):
            if draft.has(f"{_MEGATRON}.{key}") and draft.get(f"policy.model.{key}") is None:
                draft.rename(f"{_MEGATRON}.{key}", f"policy.model.{key}")


# Layout and memory


def share_out_cluster(draft: Draft) -> None:
    """Subtract separate engines' resources from the cluster, which includes them in NeMo RL (algorithms/grpo.py)."""
    resources = "policy.generation.colocated.resources"
    if draft.get("policy.generation.colocated.enabled") is not False:
        # Engines share the ranks' GPUs, and NeMo RL ignores these keys, too.
        if given := draft.section(resources):
            draft.dropped += [f"{resources}.{key}" for key, value in given.items() if value is not None]
            draft.pop(resources)
        return
    per_node = draft.number(f"{resources}.gpus_per_node")
    if per_node and draft.get("policy.generation.backend") == "embedded":
        engines = per_node * (draft.number(f"{resources}.num_nodes") or 1)
        draft.change("policy.generation.engines", engines, "each GPU for generation has one engine")
    several = (draft.number("cluster.num_nodes") or 1) > 1
    key, asked = ("cluster.num_nodes", "num_nodes") if several else ("cluster.gpus_per_node", "gpus_per_node")
    whole, engines = draft.number(key), draft.number(f"{resources}.{asked}")
    if whole is None or engines is None or engines <= 0:
        return
    if whole <= engines:
        what = f"with {engines} for engines, {key}: {whole} leaves none to train on; NeMo RL refuses this too"
        draft.refuse(f"{resources}.{asked}", engines, f"lower it below {key}", what)
    else:
        why = f"in NeMo RL it includes the {engines} of {resources}.{asked}, here it does not"
        draft.change(key, whole - engines, why)


def leave_out_idle(draft: Draft) -> None:
    """Drop a deadline without checkpoints, and overlaps that are not possible here."""
    deadline = "checkpointing.checkpoint_must_save_by"
    if not draft.get("checkpointing.enabled") and draft.get(deadline) is not None:
        draft.drop(deadline)
    for name in ("policy", "value"):
        path = f"{name}.megatron_cfg.sequence_parallel"
        ranks = draft.number(f"{name}.megatron_cfg.tensor_model_parallel_size") or 1
        if ranks == 1 and draft.get(path) is True:
            draft.change(path, False, "it needs at least two tensor-parallel ranks")
    path = f"{_DDP}.overlap_param_gather"
    if draft.algorithm == "distillation" and draft.get(path):
        draft.change(path, False, "slower; distillation reads the output weight directly")
    fused = draft.get(f"{_MEGATRON}.use_fused_linear_logprobs")
    if draft.get(path) is True and not draft.get(f"{_DDP}.overlap_grad_reduce") and not fused:
        draft.change(path, False, "slower; here it needs overlap_grad_reduce: true")


def offload_beside_engines(draft: Draft) -> None:
    """Offload gradients, optimizer and weights if engines share the ranks' GPUs, like NeMo RL."""
    loop, offload, compare = draft.algorithm, "policy.offload", "policy.generation.compare_at_start"
    own_gpus = draft.get("policy.generation.colocated.enabled") is False
    if (
        own_gpus
        or draft.asynchronous
        or draft.get("policy.generation.backend") != "vllm"
        or draft.has(offload)
    ):
        return
    if loop in ("sft", "dpo") and draft.get(f"{loop}.max_val_samples") == 0:
        return  # no engine generates
    if loop == "ppo":
        what = "training state stays on the GPU while engines generate; NeMo RL offloads it"
        draft.note(Kind.WARNED, offload, what)
        return
    draft.change(offload, "all", "NeMo RL offloads everything while engines generate")
    draft.fill(compare, False, f"NeMo RL has no such comparison, and {offload}: all leaves no memory for it")


def state_precision(draft: Draft) -> None:
    """Merge the keys from which NeMo RL's Megatron reads the number format into policy.precision."""
    models = ("policy", "value", "teacher")
    of_layers = [f"{name}.megatron_cfg.pipeline_dtype" for name in models]
    of_optimizers = [f"{name}.megatron_cfg.optimizer.bf16" for name in models[:2]]
    for path in (*of_layers, *of_optimizers):
        given, stated = draft.get(path), draft.get("policy.precision")
        if path in of_optimizers and isinstance(given, bool):
            given = "bfloat16" if given else "float32"
        if given is not None and stated is None:
            draft.set("policy.precision", given)
            draft.note(Kind.RENAMED, path, "policy.precision")
        if given is None or stated is None or given == stated:
            draft.drop(path)
        else:
            what = f"{shown(draft.get(path))} contradicts policy.precision: {shown(stated)}"
            draft.refuse(path, draft.get(path), "remove one of the two", what)


STEPS = (
    state_precision,
    clip_as_read,
    share_out_cluster,
    follow_schedules,
    leave_out_idle,
    read_prediction_layers,
    read_overrides,
    offload_beside_engines,
)
