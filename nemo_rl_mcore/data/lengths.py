"""What every engine asks of its prompts."""

from typing import cast

from torch import Tensor

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.errors import RefusedError


def check_lengths(input_lengths: Tensor, policy: PolicyConfig) -> None:
    """Refuse prompts that leave no room for a whole response: training, and an engine's cache, end there.

    input_lengths: tokens of each prompt [B].
    Raises ValueError, naming row, lengths and keys.
    """
    new, longest = policy.reserved_tokens, policy.max_total_sequence_length
    lengths = cast("list[int]", input_lengths.tolist())  # pyright: ignore[reportUnknownMemberType]
    for row, length in enumerate(lengths):
        if length + new > longest:
            raise RefusedError(
                f"row {row} has a prompt of {length} tokens, which {new} of policy.generation.max_new_tokens take "
                f"to {length + new}, past policy.max_total_sequence_length: {longest}; shorten the prompt or change "
                "one of the two",
                code="prompt-length",
            )
