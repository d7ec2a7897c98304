"""The learning-rate schedule: NeMo RL advances it at each call of `train`, and this package at each optimizer step."""

from nemo_rl_mcore.tools.migrate.draft import Draft, Kind, Note

_SECTIONS = ("policy.megatron_cfg.scheduler", "value.megatron_cfg.scheduler", "value.scheduler")
_ITERATIONS = ("lr_warmup_iters", "lr_decay_iters")


def stretch_schedule(draft: Draft) -> None:
    """Multiply iterations by the optimizer steps of a rollout, so that the rate of a rollout is the one that it was.

    A call of `train` takes a whole rollout, once more for each of `ppo_epochs`; its optimizer steps follow from
    policy.train_global_batch_size (megatron_policy_worker.py: "Step LR scheduler once per train() call").
    """
    steps = _optimizer_steps(draft)
    if steps == 1:
        return
    for section in _SECTIONS:
        for key in _ITERATIONS:
            path = f"{section}.{key}"
            iterations = draft.number(path)
            if iterations:
                why = f"a rollout is {steps} optimizer steps, each of which counts here; there it counts once"
                draft.change(path, iterations * steps, why)


def decay_as_scheduled(draft: Draft) -> None:
    """Write the constant weight decay of a schedule, which rules there, as the optimizer's, which is to agree here.

    One that changes is told to end elsewhere: at Megatron-Bridge's train_iters, the steps of the run.
    """
    for model in ("policy.megatron_cfg", "value.megatron_cfg", "value"):
        schedule = draft.section(f"{model}.scheduler")
        start, end = schedule.get("start_weight_decay"), schedule.get("end_weight_decay")
        path = f"{model}.optimizer.weight_decay"
        constant = schedule.get("weight_decay_incr_style", "constant") == "constant"
        if constant and start is not None and start == end and draft.has(path) and draft.get(path) != start:
            draft.change(path, start, "the schedule's, which takes the place of the optimizer's at each step")
        elif not constant and end is not None:
            what = f"{end} is reached with lr_decay_iters here, and with the last step there"
            draft.notes.append(Note(Kind.CHANGED, f"{model}.scheduler.end_weight_decay", what))


def _optimizer_steps(draft: Draft) -> int:
    """Return those of a rollout; 1 where there is none, or `check` refuses the numbers."""
    loop = draft.algorithm
    prompts, answers = (
        draft.number(f"{loop}.num_prompts_per_step"),
        draft.number(f"{loop}.num_generations_per_prompt"),
    )
    batch = draft.number("policy.train_global_batch_size")
    if not prompts or not answers or not batch or batch < 0:
        return 1
    return max(1, prompts * answers // batch)
