"""Configurations of the prompts and of the environment that scores the answers."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nemo_rl_mcore.config.base import PositiveInt, Problem, StrictModel


class DataConfig(StrictModel):
    """The source of prompts: an embedded task over strings of digits, drawn by a deterministic generator."""

    dataset_name: Literal["copy", "reverse", "sort", "increment"]
    """The task: answer the digits as they are, in reverse, sorted, or each one higher."""
    num_digits: Annotated[int, Field(ge=1, le=9)] = 3
    """Digits of a prompt; its text is the digits and a `>`."""
    max_input_seq_length: PositiveInt | None = None
    """Tokens of a prompt at most; null takes the length that the task has."""

    @property
    def prompt_length(self) -> int:
        """Characters of a prompt: the digits and the `>`."""
        return self.num_digits + 1

    @property
    def train_prompts(self) -> int:
        """Different training prompts that surely exist; a hash decides the exact share."""
        return 87 * 10**self.num_digits // 100

    @property
    def validation_prompts(self) -> int:
        """Held-out prompts that surely exist; a hash decides the exact share."""
        return 9 * 10**self.num_digits // 100

    @property
    def max_prompt_length(self) -> int:
        """Tokens that a sequence must have room for before the response."""
        return self.prompt_length if self.max_input_seq_length is None else self.max_input_seq_length

    def problems(self) -> Iterator[Problem]:
        """Yield prompts that are longer than the maximum."""
        if self.max_prompt_length < self.prompt_length:
            yield Problem(
                "max_input_seq_length",
                f"{self.max_input_seq_length} is shorter than the prompts of {self.dataset_name} with "
                f"num_digits: {self.num_digits}, which have {self.prompt_length} tokens",
                f"set max_input_seq_length to {self.prompt_length} or more, or lower num_digits",
                ("num_digits",),
            )


class ArithmeticEnvConfig(StrictModel):
    """The environment of the embedded tasks: the share of correct characters, end-of-sequence included."""


class EnvConfig(StrictModel):
    """The environment that scores the answers."""

    arithmetic: ArithmeticEnvConfig = ArithmeticEnvConfig()
    """The embedded tasks."""
