"""Say so when an answer is about to outweigh all others: its advantage is far from what rewards and whitening give."""

from __future__ import annotations

import sys

from torch import Tensor

from nemo_rl_mcore.algorithms.episode_rows import EpisodeRows
from nemo_rl_mcore.algorithms.rollout import Rollout
from nemo_rl_mcore.output import write_line

USUAL_LIMIT = 100.0
_NAMED_SAMPLES = 4
_SHOWN_CHARACTERS = 80


def warn_of_large_advantages(step: int, rollout: Rollout) -> None:
    """Write one line to standard error if a trained token has an advantage above 100 in absolute value."""
    batch = rollout.batch
    trained = batch["token_mask"] * batch["sample_mask"].unsqueeze(1) > 0
    episodes = EpisodeRows.of(batch)
    largest_E = episodes.joined(batch["advantages"].abs().masked_fill(~trained, 0.0)).amax(1)
    if (largest_E > USUAL_LIMIT).any():
        write_line(sys.stderr, _describe(step, rollout, episodes.first, largest_E))


def _describe(step: int, rollout: Rollout, first_E: Tensor, largest_E: Tensor) -> str:
    order = largest_E.argsort(descending=True, stable=True)
    above = [int(number) for number in order if largest_E[number] > USUAL_LIMIT]
    named = [
        _describe_row(rollout, int(first_E[number]), float(largest_E[number]))
        for number in above[:_NAMED_SAMPLES]
    ]
    more = ", ..." if len(above) > _NAMED_SAMPLES else ""
    return (
        f"step {step}: {len(above)} of {len(largest_E)} responses have advantages above {USUAL_LIMIT:g} in absolute "
        f"value and outweigh the others: {', '.join(named)}{more}"
    )


def _describe_row(rollout: Rollout, row: int, size: float) -> str:
    prompt, sample = rollout.prompts[row], int(rollout.batch["sample_index"][row])
    text = f"{prompt.text[:_SHOWN_CHARACTERS]}{'...' if len(prompt.text) > _SHOWN_CHARACTERS else ''}"
    reward = float(rollout.batch["rewards"][row])
    return f"prompt {prompt.index} {text!r} sample {sample}: {size:.4g} (reward {reward:.4g})"
