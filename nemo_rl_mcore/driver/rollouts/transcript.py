"""What an episode leaves behind: its tokens in rows, each sampled one in the context that it was sampled in.

An episode is one row while each prompt begins with all that stood before it. Where one does not, because a chat
template drops earlier thoughts or an agent edits its history, another row begins with that prompt: rows fork, and no
token is trained twice. Shapes: B rows, N tokens of a piece, S of the longest row, T turns at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import EPISODE, digest_of_ids
from nemo_rl_mcore.data.turns import Ending, Reply
from nemo_rl_mcore.errors import RunStoppedError

WEIGHT_VERSIONS = "weight_versions"
TURN_OF_TOKEN = "turn_of_token"
DIGESTS = "digests"
SAMPLED_DIGESTS = "sampled_digests"
REWARDS_PREFIX = "rewards/"
REPLIES = "replies"
RESPONSES = "responses"
_RECORDED = (WEIGHT_VERSIONS, TURN_OF_TOKEN, SAMPLED_DIGESTS, REPLIES, RESPONSES)


@dataclass(frozen=True)
class Piece:
    """A prompt, an observation or an answer of N tokens, and what is known of each, or one number for all of them.

    No lists: they would have an object for each token of a step. turn: 0 where nothing was sampled.
    """

    ids_N: NDArray[Any]
    turn: int = 0
    logprobs_N: NDArray[Any] | float = 0.0
    versions_N: NDArray[Any] | int = -1


@dataclass
class Transcript:
    """An episode so far. rows: at least one, each of pieces; digests: of the answers, see `data.token_digests`."""

    prompt_index: int
    sample: int
    rows: list[list[Piece]]
    digests: list[int] = field(default_factory=list[int], kw_only=True)
    finished: bool = field(default=False, kw_only=True)
    """Whether the last answer ended by itself."""
    response: str | None = field(default=None, kw_only=True)
    """The text of the only answer; None where there are several, or nobody has decoded it."""
    reward: float = field(default=0.0, kw_only=True)
    rewards: dict[str, float] = field(default_factory=dict[str, float], kw_only=True)
    replies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]], kw_only=True)
    ending: Ending | None = field(default=None, kw_only=True)

    def take(self, reply: Reply) -> None:
        """Add up what the environment says of the last answer."""
        self.reward += reply.reward
        for name, reward in reply.rewards.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + reward
        self.replies.append(reply.to_json())

    @property
    def has_versions(self) -> bool:
        """The engine told the versions of the weights that sampled a token."""
        return any(not isinstance(piece.versions_N, int) for row in self.rows for piece in row)


def batch_of(
    episodes: Sequence[Transcript], *, pad_token_id: int, turns: int, versions: bool, digests: bool
) -> BatchedDataDict:
    """Return all episodes that have ended, in their order; the columns are those of `player.Rollout`, scored.

    turns: an episode may have. versions, digests: whether the engine tells them.
    """
    rows = [row for episode in episodes for row in episode.rows]
    places = [place for place, episode in enumerate(episodes) for _ in episode.rows]
    of_row = torch.tensor(places)

    def each(value: Callable[[Transcript], Any]) -> torch.Tensor:
        return torch.tensor([value(episode) for episode in episodes])[of_row]

    turn_of_token = padded(rows, lambda piece: piece.turn, 0)
    ending = each(lambda episode: int(episode.ending or Ending.TERMINATED))
    uncounted = ending >= Ending.DROPPED
    batch = BatchedDataDict(
        input_ids=padded(rows, lambda piece: piece.ids_N, pad_token_id),
        input_lengths=torch.tensor([tokens_of(row) for row in rows]),
        token_mask=(turn_of_token > 0).float(),
        sample_mask=(~uncounted).float(),
        generation_logprobs=padded(rows, lambda piece: piece.logprobs_N, 0.0),
        finished=each(lambda episode: episode.finished) & (ending == Ending.TERMINATED),
        prompt_index=each(lambda episode: episode.prompt_index),
        sample_index=each(lambda episode: episode.sample),
        ending=ending,
        rewards=each(lambda episode: episode.reward).masked_fill(uncounted, 0.0),
        replies=[episodes[place].replies for place in places],
    )
    if turns > 1:
        batch[TURN_OF_TOKEN] = turn_of_token
    if versions:
        batch[WEIGHT_VERSIONS] = padded(rows, lambda piece: piece.versions_N, -1)
    if digests:
        batch[SAMPLED_DIGESTS] = each(lambda one: one.digests + [0] * (turns - len(one.digests))).long()
    if any(episode.response is not None for episode in episodes):
        batch[RESPONSES] = [episodes[place].response for place in places]
    for name in sorted({name for episode in episodes for name in episode.rewards}):
        batch[f"{REWARDS_PREFIX}{name}"] = each(lambda one, name=name: one.rewards.get(name, 0.0))
    if len(rows) > len(episodes):
        batch[EPISODE] = of_row
    return batch


def padded(
    rows: Sequence[Sequence[Piece]], values: Callable[[Piece], NDArray[Any] | float], fill: float
) -> torch.Tensor:
    """Return [B, S] of a value for each token, filled on the right: fp32 where `fill` is a float, else int64."""
    padded_BS = torch.full((len(rows), max(map(tokens_of, rows))), fill)
    for padded_S, row in zip(padded_BS.numpy(), rows, strict=True):
        start = 0
        for piece in row:
            padded_S[start : start + len(piece.ids_N)] = values(piece)
            start += len(piece.ids_N)
    return padded_BS


def tokens_of(row: Sequence[Piece]) -> int:
    return sum(len(piece.ids_N) for piece in row)


def sampled_versions(batch: BatchedDataDict) -> torch.Tensor:
    """Return weight_versions of sampled tokens alone, int64 [B, T], row by row from the left, -1 after a row's end."""
    versions = batch[WEIGHT_VERSIONS]
    order = (versions < 0).long().argsort(dim=1, stable=True)
    return versions.gather(1, order)[:, : int((versions >= 0).sum(1).max())]


def with_equal_columns(batches: Sequence[BatchedDataDict]) -> list[BatchedDataDict]:
    """Give all batches the columns that depend on their episodes, where one of them has them.

    Where all were dropped, no reward has a name and nothing was sampled; where none has several rows, each row is one.
    """
    names = dict.fromkeys(name for batch in batches for name in batch)
    equal: list[BatchedDataDict] = []
    for batch in batches:
        missing: dict[str, Any] = {}
        for name in names:
            if name in batch:
                continue
            if name == EPISODE:
                missing[name] = torch.arange(batch.size)
            elif name == RESPONSES:
                missing[name] = [None] * batch.size
            elif name == WEIGHT_VERSIONS:
                missing[name] = torch.full_like(batch["input_ids"], -1)
            elif name.startswith(REWARDS_PREFIX):
                missing[name] = torch.zeros(batch.size)
        equal.append(BatchedDataDict({**batch, **missing}) if missing else batch)
    return equal


def trained_columns(batch: BatchedDataDict) -> BatchedDataDict:
    """Return the batch without what is only recorded of its episodes, for the ranks."""
    return BatchedDataDict(
        {
            name: column
            for name, column in batch.items()
            if name not in _RECORDED and not name.startswith(REWARDS_PREFIX)
        }
    )


def require_sampled_ids(batch: BatchedDataDict) -> None:
    """Check that what is trained on was sampled: token ids against the digests that engines took of what they sampled.

    Compared are the ids under token_mask, turn by turn, with sampled_digests int64 [B, turns], 0 where there was none.
    batch: see `Rollout`; without turn_of_token there is one turn, and without sampled_digests, of an engine that gives
    none, nothing is compared. An episode of several rows is compared as one. Raises RunStoppedError, naming the answer,
    for the first one that differs.
    """
    if SAMPLED_DIGESTS not in batch:
        return
    episodes = batch.samples()
    sampled_EN: NDArray[np.int64] = batch[SAMPLED_DIGESTS].numpy()[[rows.start for rows in episodes]]
    found_EN = _digests_of_turns(batch, episodes)
    turns = max(sampled_EN.shape[1] + 1, found_EN.shape[1])
    expected_EN = np.pad(sampled_EN, ((0, 0), (1, turns - 1 - sampled_EN.shape[1])))
    wrong = np.argwhere(np.pad(found_EN, ((0, 0), (0, turns - found_EN.shape[1]))) != expected_EN)
    if not len(wrong):
        return
    episode, turn = map(int, wrong[0])
    first = episodes[episode].start
    prompt, sample = int(batch["prompt_index"][first]), int(batch["sample_index"][first])
    what = f"answer {turn}" if turn else "an observation"
    raise RunStoppedError(
        f"prompt_index {prompt}, sample_index {sample}: {what} would be trained on as tokens that the engine "
        "did not sample, by the digest of the ids that it sampled; what stands between generation and training "
        "changes input_ids, token_mask or turn_of_token",
        code="ids-differ",
    )


def _digests_of_turns(batch: BatchedDataDict, episodes: list[range]) -> NDArray[np.int64]:
    """Of the trained ids of each turn, [E, 1 + N]; turn 0 is of observations, which nobody sampled."""
    mask_BS: NDArray[np.bool_] = batch["token_mask"].numpy() != 0
    turns_BS: NDArray[np.int64] = batch.get(TURN_OF_TOKEN, batch["token_mask"].long()).numpy()
    episode_of_row = np.repeat(np.arange(len(episodes)), [len(rows) for rows in episodes])
    # All trained tokens, one after the other: those of a turn together, in their order.
    turn_T, id_T = turns_BS[mask_BS], np.ascontiguousarray(batch["input_ids"].numpy()[mask_BS])
    turns = 1 + int(turn_T.max(initial=0))
    group_T = episode_of_row[mask_BS.nonzero()[0]] * turns + turn_T
    order = group_T.argsort(kind="stable")
    group_T = group_T[order]
    starts = np.flatnonzero(np.diff(group_T, prepend=-1))
    parts = np.split(id_T[order], starts[1:])
    found = np.zeros(len(episodes) * turns, dtype=np.int64)
    found[group_T[starts]] = [digest_of_ids(ids) for ids in parts[: len(starts)]]
    return found.reshape(len(episodes), turns)
