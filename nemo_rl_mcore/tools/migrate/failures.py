"""What NeMo RL's single controller does about answers that fail or grow old, and runs that stand still."""

from nemo_rl_mcore.tools.migrate.draft import Draft, Kind, Note

_FAILURE = "async_rl.rollout_failure"
_WATCHDOG = "async_rl.stall_watchdog"
_SAMPLER = "async_rl.sampler"
_OWN = "grpo.async_grpo"
_ATTEMPTS = 5
_STALL_S = 600.0
"""NeMo RL's defaults."""


def try_again(draft: Draft) -> None:
    """Count attempts as failures in a row; prompts that are given up on, so that a step shrinks, are not known here."""
    section = draft.section(_FAILURE)
    if draft.algorithm != "grpo" or not section:
        return
    if any(section.get(key) for key in ("max_skipped_prompts", "max_consecutive_dropped_prompts")):
        return  # refused, see foreign/of_runs.py
    attempts = section.get("max_infra_attempts_per_prompt", _ATTEMPTS)
    timeout = draft.get(f"{_FAILURE}.native.generation_timeout_s")
    draft.pop(_FAILURE)
    if isinstance(attempts, int) and attempts > 0 and not draft.has(f"{_OWN}.max_generation_failures"):
        why = f"{attempts} attempts to each prompt there; here failures in a row, over all prompts"
        draft.change(f"{_OWN}.max_generation_failures", attempts - 1, why)
    if timeout is not None and not draft.has(f"{_OWN}.rollout_timeout_s"):
        draft.change(f"{_OWN}.rollout_timeout_s", timeout, f"as {_FAILURE}.native.generation_timeout_s says")
    draft.notes.append(Note(Kind.RENAMED, _FAILURE, f"{_OWN}.max_generation_failures"))


def watch_stalls(draft: Draft) -> None:
    """End a stalled run where NeMo RL does; a warning of one is written nowhere here."""
    section = draft.section(_WATCHDOG)
    if draft.algorithm != "grpo" or not section:
        return
    draft.pop(_WATCHDOG)
    if section.get("stall_action", "warn") == "warn":
        what = "a stall is not warned of; grpo.async_grpo.stall_timeout_s ends the run"
        draft.notes.append(Note(Kind.WARNED, _WATCHDOG, what))
    elif not draft.has(f"{_OWN}.stall_timeout_s"):
        stall = section.get("stall_timeout_s", _STALL_S)
        draft.change(f"{_OWN}.stall_timeout_s", stall, f"as {_WATCHDOG}.stall_timeout_s says")


def train_within_the_window(draft: Draft) -> None:
    """Take answers as they are completed where NeMo RL samples more than it trains on, and discards what is too old.

    Within the window both take whatever is there; here no more is asked for than can be trained on in time.
    """
    if draft.algorithm != "grpo" or not draft.section(_SAMPLER):
        return
    name = draft.get(f"{_SAMPLER}.name")
    unread = "max_staleness_versions" if name in (None, "in_order") else "max_lookahead_versions"
    if name != "custom" and draft.has(f"{_SAMPLER}.{unread}"):
        draft.pop(f"{_SAMPLER}.{unread}")
        draft.dropped.append(f"{_SAMPLER}.{unread}")
    if name != "windowed":
        return
    if draft.get(f"{_SAMPLER}.sample_freshest_first") is True:
        return  # refused with the sampler
    draft.set(f"{_SAMPLER}.name", "ready_first")
    for path in (f"{_SAMPLER}.sample_freshest_first", "async_rl.max_buffered_rollouts"):
        if draft.has(path):
            draft.pop(path)
            draft.dropped.append(path)
    what = "windowed -> as_completed; answers train as they come there too, and those that are too old are discarded"
    draft.notes.append(
        Note(Kind.CHANGED, f"{_OWN}.order", f"{what}; here no more are asked for than train in time")
    )
    draft.comments[f"{_OWN}.order"] = (
        "NeMo RL: windowed, which discards answers that are too old. Here no more are asked for than train in time."
    )


STEPS = (try_again, watch_stalls, train_within_the_window)
