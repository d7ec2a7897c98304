"""Recipes whose rollouts NeMo Gym plays: its configuration is passed on, and its agents call the endpoint."""

from typing import cast

from nemo_rl_mcore.config.base import Tree
from nemo_rl_mcore.tools.migrate.draft import Draft

_SECTION = "env.nemo_gym"
_VLLM = "policy.generation.vllm_cfg"
_TURNS = "grpo.max_rollout_turns"
_CALLS = 1000
"""More than an agent of a recipe makes; its own bounds, and the length of a sequence, end a session before."""
_LONGEST_S = 7200
_OF_THE_LOOP = {
    "is_trajectory_collection": (False, "run `nemo-rl-mcore generate` for answers alone"),
    "effort_levels": (None, "write rewards by length into a verifier of NeMo Gym"),
    "pad_dynamic_image_shapes": (False, "models see text alone"),
}
"""Keys that NeMo RL takes out before it starts Gym: the value that changes nothing, and what to do about others."""
_DROPPED = ("num_gpu_nodes", "rollout_max_attempts_to_avoid_lp_nan", "tokenizer_config")
"""The first is of machines, the second of broken log-probabilities, which end a run here."""
_OF_PENALTIES = ("invalid_tool_call_patterns", "thinking_tags")
_PARSERS = {"hermes": "hermes", "qwen3_coder": "qwen3.5"}
"""vLLM's names of how calls of tools are written, and those of env.endpoint.tool_parser."""


def use_nemo_gym(draft: Draft) -> None:
    """Keep Gym's own configuration where a recipe uses it, and say what its agents need here."""
    section = draft.section(_SECTION)
    used = draft.get("env.should_use_nemo_gym")
    if not section:
        return
    if used is False:
        draft.pop(_SECTION)
        draft.dropped.append(_SECTION)
        return
    for key, (neutral, remedy) in _OF_THE_LOOP.items():
        if key in section:
            value = section.pop(key)
            if value not in (neutral, None) and not _without_weight(value):
                draft.refuse(f"{_SECTION}.{key}", value, remedy)
    for key in (*_DROPPED, *_OF_PENALTIES):
        if section.pop(key, None) is not None:
            draft.dropped.append(f"{_SECTION}.{key}")
    _play(draft)
    _parse_tools(draft)
    if draft.get("env.should_mask_flagged_samples") is not False:
        why = "samples that NeMo Gym masks are dropped, as many as there are"
        draft.change("env.pool.max_drop_rate", 1.0, why)


def _without_weight(levels: object) -> bool:
    return isinstance(levels, dict) and not cast("Tree", levels).get("low_weight")


def _play(draft: Draft) -> None:
    if draft.pop(f"{_VLLM}.expose_http_server") is not None:
        draft.dropped.append(f"{_VLLM}.expose_http_server")
    if draft.pop("env.math") is not None:
        draft.dropped.append("env.math")
    if draft.algorithm == "grpo":
        draft.change(_TURNS, _CALLS, "calls of the model in a session, which NeMo RL leaves to the agent")
    draft.change("env.endpoint.timeout_s", _LONGEST_S, "NeMo RL waits for an agent as long as it takes")


def _parse_tools(draft: Draft) -> None:
    path = f"{_VLLM}.http_server_serving_chat_kwargs.tool_parser"
    parser = draft.get(path)
    if parser is None:
        draft.change("env.endpoint.tool_parser", "none", "no parser of tools is named")
    elif (own := _PARSERS.get(str(parser))) is not None:
        draft.change("env.endpoint.tool_parser", own, f"the form that vLLM calls {parser}")
    else:
        draft.refuse(path, parser, f"env.endpoint.tool_parser reads those of {', '.join(_PARSERS)}")


STEPS = (use_nemo_gym,)
