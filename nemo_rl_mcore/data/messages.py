"""The turns of a conversation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """A turn of a conversation."""

    role: str
    content: str
