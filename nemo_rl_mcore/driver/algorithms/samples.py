"""Answers with what became of them, as they are written down for people to read.

Shapes: B rows, S columns; N tokens of a row, from its first sampled one on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import EPISODE
from nemo_rl_mcore.data.tokenizer import Tokenizer, token_texts
from nemo_rl_mcore.driver.observability.rollouts import Sample, TokenTable, TurnRecord
from nemo_rl_mcore.driver.rollouts.player import Rollout, prompt_lengths
from nemo_rl_mcore.driver.rollouts.transcript import REPLIES, REWARDS_PREFIX, TURN_OF_TOKEN, WEIGHT_VERSIONS

_DECIMALS = 4


def samples_of(
    rollout: Rollout, step: int, tokenizer: Tokenizer, *, tables: int = 0, of_validation: bool = False
) -> list[Sample]:
    """Return every row of a step or of a validation; the first `tables` of them token by token."""
    batch = rollout.batch
    prompt_tokens_B = prompt_lengths(batch)
    current = step if of_validation else step - 1  # the version that has drawn all, where none is told
    versions = batch.get(WEIGHT_VERSIONS, torch.full((batch.size, 1), current))
    newest = versions.amax(1)
    columns = {
        "prompt_index": batch["prompt_index"],
        "sample_index": batch["sample_index"],
        "reward": rollout.environment_rewards,
        "shaped_reward": batch["rewards"],
        "prompt_tokens": prompt_tokens_B,
        "response_tokens": batch["token_mask"].sum(1).long(),
        "truncated": ~batch["finished"],
        **({} if of_validation else {"sample_mask": batch["sample_mask"]}),
        **_advantages(batch),
        "weight_version_min": torch.where(versions < 0, newest.unsqueeze(1), versions).amin(1),
        "weight_version_max": newest,
    }
    values: list[list[Any]] = [column.tolist() for column in columns.values()]  # pyright: ignore[reportUnknownMemberType]
    by_name = {  # None where a reward is more than a float32 holds
        name.removeprefix(REWARDS_PREFIX): [r if math.isfinite(r) else None for r in column.tolist()]
        for name, column in batch.items()
        if name.startswith(REWARDS_PREFIX)
    }
    several = TURN_OF_TOKEN in batch

    def table(row: int) -> TokenTable:
        return _token_table(batch.slice(row, row + 1), tokenizer, of_validation)

    return [
        Sample(
            step=step,
            prompt=rollout.prompts[row].text,
            answer=rollout.prompts[row].answer,
            response=rollout.responses[row],
            source=rollout.prompts[row].source,
            rewards={name: rewards[row] for name, rewards in by_name.items()} or None,
            turns=[*_said(batch, row, tokenizer)] if several else None,
            tokens=table(row) if row < tables else None,
            **dict(zip(columns, of_row, strict=True)),
        )
        for row, of_row in enumerate(zip(*values, strict=True))
    ]


def _advantages(batch: BatchedDataDict) -> dict[str, torch.Tensor]:
    """Of each response the mean over its tokens, and that of the first one, where the batch has advantages."""
    if "advantages" not in batch:
        return {}
    mask, advantages = batch["token_mask"], batch["advantages"]
    # A response without a token has a mean of nothing, which is not finite.
    mean, first = (advantages * mask).sum(1) / mask.sum(1), mask.argmax(1, keepdim=True)
    return {"advantage": mean, "advantage_first": advantages.gather(1, first).squeeze(1)}


def _said(batch: BatchedDataDict, row: int, tokenizer: Tokenizer) -> Iterator[TurnRecord]:
    """Yield a row's answers, and the observations between them.

    Of an episode of several rows each has the answers of which it has sampled tokens, and of these only its own tokens.
    """
    ids_S, turn_S = batch["input_ids"][row].numpy(), batch[TURN_OF_TOKEN][row].numpy()
    replies = batch[REPLIES][row]
    turns = [*range(1, len(replies) + 1)]
    if EPISODE in batch:
        turns = [turn for turn in turns if turn in turn_S]
    for place, turn in enumerate(turns):
        # What the model was shown before it; what is said to the last one it is not.
        for role, content in replies[turn - 2].get("observation", ()) if place else ():
            yield TurnRecord(role=role, content=content)
        reply = replies[turn - 1]
        said = TurnRecord(role="assistant", content=tokenizer.decode(ids_S[turn_S == turn].tolist()))
        if not reply.keys() & {"dropped", "unscored"}:
            said["reward"] = reply["reward"]
        yield said


def _token_table(batch: BatchedDataDict, tokenizer: Tokenizer, of_validation: bool) -> TokenTable:
    """Of a batch of one row."""
    own = slice(int(prompt_lengths(batch)), int(batch["input_lengths"]))
    ids_N, mask_N = batch["input_ids"][0, own], batch["token_mask"][0, own]
    sampled = mask_N.bool().tolist()

    def numbers(name: str) -> list[float | None] | None:
        if name not in batch:
            return None
        values = zip(batch[name][0, own].tolist(), sampled, strict=True)
        # What rounds to -0.0 is 0.
        return [
            (round(value, _DECIMALS) or 0.0) if drawn and math.isfinite(value) else None
            for value, drawn in values
        ]

    return TokenTable(
        text=token_texts(tokenizer, ids_N.tolist()),
        turn=batch.get(TURN_OF_TOKEN, batch["token_mask"])[0, own].int().tolist(),
        mask=None if of_validation else (mask_N * batch["sample_mask"]).bool().int().tolist(),
        generation_logprobs=numbers("generation_logprobs"),
        prev_logprobs=numbers("prev_logprobs"),
        advantages=numbers("advantages"),
    )
