"""How long the sequences of a rehearsal are: as short as its rows, and the texts around them, allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import Tree
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceDefaults
from nemo_rl_mcore.tools.rehearse.data import LONGEST, is_here

_NEW = 8
"""Tokens of a response."""
_AROUND = 96
"""Tokens that a chat template writes, at most."""
_OBSERVED = 16
"""Tokens of what an environment says between two turns."""
_TURNS = 3
_LONGEST_OWN = 512
"""Tokens of a row of the recipe's own data, which is left out where it is longer."""


def length_keys(config: RunConfig) -> Tree:
    """Return the keys of lengths."""
    keys: Tree = {
        "policy.max_total_sequence_length": _total(config),
        "policy.generation.max_new_tokens": min(_NEW, config.policy.generation.max_new_tokens),
    }
    if config.data.max_input_seq_length is not None and not config.data.embedded:
        keys["data.max_input_seq_length"] = None
    if config.data.from_files:
        keys["data.overlong"] = "drop"
    if isinstance(config.loop, RolloutConfig) and config.loop.reward_shaping.max_response_length:
        shaping = f"{config.algorithm}.reward_shaping"
        keys |= {f"{shaping}.max_response_length": _NEW, f"{shaping}.overlong_buffer_length": _NEW // 2}
    return keys


def _total(config: RunConfig) -> int:
    policy = config.policy
    turns = min(_TURNS, config.max_rollout_turns)
    response = turns * (_NEW + _OBSERVED) if turns > 1 else _NEW
    if config.data.from_files and all(map(is_here, config.train_sources.values())):
        own = min(_LONGEST_OWN, policy.max_total_sequence_length)
        return _rounded(own)
    prompt = config.data.prompt_length if config.data.embedded else LONGEST
    answers = LONGEST if config.row_kind is not RowKind.PROMPTS else 0
    return _rounded(prompt + answers + _texts(config) + response)


def _rounded(tokens: int) -> int:
    return -(-tokens // 64) * 64


def _texts(config: RunConfig) -> int:
    """Return how many tokens stand around a prompt at most: no character of a text is more than two."""
    data = config.data
    shown: list[SourceDefaults] = [*config.train_sources.values(), *config.validation_sources.values()]
    if data.default is not None:
        shown.append(data.default)
    around = max((sum(2 * size for size in _sizes(one)) for one in shown), default=0)
    return around + (_AROUND if data.apply_chat_template else 0)


def _sizes(source: SourceDefaults) -> Iterator[int]:
    for name in (source.prompt_file, source.system_prompt_file):
        if name is not None and Path(name).is_file():
            yield len(Path(name).read_text(encoding="utf-8"))
