"""The turns of a conversation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """A turn of a conversation."""

    role: str
    content: str


Context = str | tuple[Message, ...]
"""What the model is shown before it answers: a text, or a conversation."""
