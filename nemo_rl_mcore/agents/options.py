"""What the endpoint knows of the run in front of whose engines it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_mcore.agents.tools import ToolParser
from nemo_rl_mcore.data.tokenizer import Tokenizer

MIB = 1 << 20


@dataclass(frozen=True)
class RunSampling:
    """How the run draws answers; a call may say the same, or nothing.

    top_k: None where all tokens are kept. max_new_tokens: of an answer. stop_strings, stop_ids: end an answer and
    belong to it; among the ids is the end of sequence.
    """

    temperature: float
    top_p: float
    top_k: int | None
    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class EndpointOptions:
    """model: its name. context: tokens of prompt and answer together at most.

    version: of the weights, now. health: what `/health` tells besides. failed: is told what the endpoint itself has
    raised. body_limit: bytes of a request; body_seconds: within which it has to come;
    bodies_limit: bytes of all requests that are being read.
    """

    model: str
    context: int
    tokenizer: Tokenizer
    sampling: RunSampling
    tool_parser: ToolParser
    version: Callable[[], int]
    failed: Callable[[BaseException], None]
    health: Callable[[], Mapping[str, Any]] = dict
    body_limit: int = 32 * MIB
    body_seconds: float = 30.0
    bodies_limit: int = 256 * MIB
    write_seconds: float = 30.0
    """Within which a client has to take an answer."""
