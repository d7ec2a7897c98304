"""NeMo RL's keys of training, models and layouts that mean something else here, present or absent."""

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

# DTensor, NeMo RL's other backend of a policy


def use_megatron(draft: Draft) -> None:
    """Translate DTensor's keys into Megatron's, where a recipe uses it.

    Torch's optimizers are translated if their weight decay is decoupled.
    """
    if not draft.get(f"{_DTENSOR}.enabled"):
        return
    draft.change(f"{_MEGATRON}.enabled", True, "Megatron takes the place of DTensor, the only backend here")
    section = draft.section(_DTENSOR)
    for theirs, ours in KEYS["dtensor"].items():
        _take(draft, f"{_MEGATRON}.{ours}", section.get(theirs), f"{_DTENSOR}.{theirs}")
    for key, value in [*section.items()]:
        judge(draft, f"{_DTENSOR}.{key}", value, section, draft.tree)
    draft.set(f"{_DTENSOR}.enabled", False)
    if draft.get("policy.max_grad_norm") is None:
        draft.change("policy.max_grad_norm", 0.0, "DTensor clips no gradient where it is null, or left out")
    draft.drop(f"{_MEGATRON}.optimizer.clip_grad")  # which DTensor does not read
    _take(draft, f"{_DDP}.grad_reduce_in_fp32", True, "DTensor, whose gradients are reduced in fp32,")
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
        _take(draft, f"{_MEGATRON}.optimizer.{key}", value, "policy.optimizer")
    # They are copies of the optimizer's there, which has just got other values.
    draft.dropped += [f"{_MEGATRON}.scheduler.{key}" for key in draft.section(f"{_MEGATRON}.scheduler")]
    draft.set(f"{_MEGATRON}.scheduler", {"lr_decay_style": "constant"})
    _use_warmup(draft, lr)


def _use_warmup(draft: Draft, lr: object) -> None:
    """Migrate a linear warm-up with a constant rate, as the exemplars have it; refuse any other schedule.

    What is left out has torch's defaults.
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
                _take(draft, f"{place}.lr_warmup_iters", kwargs.get("total_iters", 5), path)
                if _is_number(lr) and _is_number(start):
                    _take(draft, f"{place}.lr_warmup_init", float(f"{start * lr:.6g}"), path)
            case "ConstantLR" if kwargs.get("factor", 1 / 3) == 1.0:
                continue
            case "" if "milestones" in step:
                continue
            case _:
                draft.refuse(path, draft.get(path), f"set {place}; its warm-up is linear")
                return


def _take(draft: Draft, target: str, value: object, source: str) -> None:
    if value is not None and value != draft.get(target):
        draft.change(target, value, f"as {source} says, which this recipe reads")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Optimizer and schedule


def clip_as_read(draft: Draft) -> None:
    """Take the norm that Megatron's optimizer reads, clip_grad, for max_grad_norm, which is DTensor's alone."""
    for name in ("policy", "value"):
        path, read = f"{name}.max_grad_norm", f"{name}.megatron_cfg.optimizer.clip_grad"
        norm = draft.get(read)
        if norm is None or norm == draft.get(path):
            draft.drop(read)
        elif draft.has(path):
            draft.change(path, norm, "Megatron's optimizer reads megatron_cfg.optimizer.clip_grad alone")
            draft.drop(read)
        else:
            draft.rename(read, path)


def follow_schedules(draft: Draft) -> None:
    """Multiply iterations by a rollout's optimizer steps, so that each rollout keeps its learning rate.

    NeMo RL advances its schedule at each call of `train`, and this package at each optimizer step. A call takes a whole
    rollout, once more for each of `ppo_epochs`; its optimizer steps follow from policy.train_global_batch_size
    (megatron_policy_worker.py: "Step LR scheduler once per train() call"). A schedule's constant weight decay takes
    precedence there, and has to agree with the optimizer's here; one that changes over the run is refused.
    """
    loop, batch = draft.algorithm, draft.number("policy.train_global_batch_size")
    prompts = draft.number(f"{loop}.num_prompts_per_step")
    answers = draft.number(f"{loop}.num_generations_per_prompt")
    steps = 1  # where there is no rollout, or `check` refuses the numbers
    if prompts and answers and batch and batch > 0:
        steps = max(1, prompts * answers // batch)
    for section in ("policy.megatron_cfg.scheduler", "value.megatron_cfg.scheduler", "value.scheduler"):
        for key in ("lr_warmup_iters", "lr_decay_iters"):
            iterations = draft.number(f"{section}.{key}")
            if iterations and steps > 1:
                why = f"a rollout is {steps} optimizer steps, each of which counts here; there it counts once"
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
            why = "the schedule's, which takes the place of the optimizer's at each step"
            draft.change(decay, first, why)
        for path in paths:
            draft.drop(path)


# Model


def read_overrides(draft: Draft) -> None:
    """Drop sections that write nothing over in config.json; a critic is the policy's model, and has its overrides.

    Sequences may be longer than the weights have positions for; rotations go on beyond them.
    """
    given = draft.section(f"value.{OVERRIDES}")
    if draft.section("value") and given != draft.section(f"policy.{OVERRIDES}"):
        draft.refuse(f"value.{OVERRIDES}", given, "give policy and value the same", "is not the policy's")
    for name in ("policy", "value", "teacher"):
        if name == "value" or not draft.section(f"{name}.{OVERRIDES}"):
            draft.drop(f"{name}.{OVERRIDES}")
    total = draft.number("policy.max_total_sequence_length")
    filled, _ = with_pretrained_model(draft.tree)
    for name in ("policy", "teacher"):
        try:
            longest = ModelConfig.model_validate(value_at(filled, f"{name}.model")).longest_sequence
        except ValueError:  # a problem that the check of the recipe reports
            continue
        if total is not None and total > longest:
            why = f"NeMo RL trains {total} tokens of a model that has been trained on {longest}"
            draft.change(f"{name}.{OVERRIDES}.max_position_embeddings", total, why)


def read_prediction_layers(draft: Draft) -> None:
    """Move prediction layers and their factor to the model; where there are none, nothing reads the rest."""
    layers = f"{_MEGATRON}.mtp_num_layers"
    if not draft.has(layers):
        return  # the model's own, if it has any
    if draft.get(layers) in (None, 0):
        for key in ("num_layers", "loss_scaling_factor", "use_repeated_layer", "detach_heads"):
            draft.drop(f"{_MEGATRON}.mtp_{key}")
        return
    filled, _ = with_pretrained_model(draft.tree)  # without its sizes no key of a model has a place
    if draft.number(layers) is not None and value_at(filled, "policy.model.num_layers") is not None:
        for key in ("mtp_num_layers", "mtp_loss_scaling_factor"):
            if draft.has(f"{_MEGATRON}.{key}") and draft.get(f"policy.model.{key}") is None:
                draft.rename(f"{_MEGATRON}.{key}", f"policy.model.{key}")


# Layout and memory


def share_out_cluster(draft: Draft) -> None:
    """Leave the ranks' share in the cluster, beside which engines are here; NeMo RL's algorithms/grpo.py divides it."""
    resources = "policy.generation.colocated.resources"
    if draft.get("policy.generation.colocated.enabled") is not False:
        # Engines share the ranks' GPUs, and NeMo RL does not read their own either.
        if given := draft.section(resources):
            draft.dropped += [f"{resources}.{key}" for key, value in given.items() if value is not None]
            draft.pop(resources)
        return
    several = (draft.number("cluster.num_nodes") or 1) > 1
    key, asked = ("cluster.num_nodes", "num_nodes") if several else ("cluster.gpus_per_node", "gpus_per_node")
    whole, engines = draft.number(key), draft.number(f"{resources}.{asked}")
    if whole is None or engines is None or engines <= 0:
        return
    if whole <= engines:
        what = f"{engines} for engines leave none of {key}: {whole} to train on, which NeMo RL refuses too"
        draft.refuse(f"{resources}.{asked}", engines, f"lower it below {key}", what)
    else:
        why = f"the {engines} of {resources}.{asked} are part of it there, and beside it here"
        draft.change(key, whole - engines, why)


def leave_out_idle(draft: Draft) -> None:
    """Drop the deadline of checkpoints that are not saved, and overlaps that are not possible here."""
    deadline = "checkpointing.checkpoint_must_save_by"
    if not draft.get("checkpointing.enabled") and draft.get(deadline) is not None:
        draft.drop(deadline)
    for name in ("policy", "value"):
        path = f"{name}.megatron_cfg.sequence_parallel"
        ranks = draft.number(f"{name}.megatron_cfg.tensor_model_parallel_size") or 1
        if ranks == 1 and draft.get(path) is True:
            draft.change(path, False, "one tensor-parallel rank has no sequence to share")
    path = f"{_DDP}.overlap_param_gather"
    if draft.algorithm == "distillation" and draft.get(path):
        draft.change(path, False, "it costs speed; a distillation reads the output weight itself")
    fused = draft.get(f"{_MEGATRON}.use_fused_linear_logprobs")
    if draft.get(path) is True and not draft.get(f"{_DDP}.overlap_grad_reduce") and not fused:
        draft.change(path, False, "it costs speed; here it needs overlap_grad_reduce: true")


def offload_beside_engines(draft: Draft) -> None:
    """Offload gradients, optimizer and weights where engines share the ranks' GPUs, as NeMo RL does."""
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
        return  # no engine answers
    if loop == "ppo":
        what = "what trains stays on the GPU while engines answer there; NeMo RL takes it off"
        draft.note(Kind.WARNED, offload, what)
        return
    draft.change(offload, "all", "NeMo RL takes all off the GPU while engines answer there")
    draft.fill(compare, False, f"NeMo RL has no such comparison, and {offload}: all no room for it")


def state_precision(draft: Draft) -> None:
    """State the number format once: NeMo RL's Megatron reads it from several keys."""
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
