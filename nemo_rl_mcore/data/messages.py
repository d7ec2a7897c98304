"""The turns of a conversation."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Message:
    """A turn of a conversation."""

    role: str
    content: str
    frame: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)
    """Characters at its beginning and at its end that a file of the recipe says; what is between them is content."""


Context = str | tuple[Message, ...]
"""What the model is shown before it answers: a text, or a conversation."""
