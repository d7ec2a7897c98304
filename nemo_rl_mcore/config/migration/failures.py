"""What NeMo RL's single controller does about answers that fail, and runs that stand still."""

from nemo_rl_mcore.config.migration.draft import Draft, Kind, Note

_FAILURE = "async_rl.rollout_failure"
_WATCHDOG = "async_rl.stall_watchdog"
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


STEPS = (try_again, watch_stalls)
