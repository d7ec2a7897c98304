"""What an episode leaves behind: its tokens in rows, each sampled one in the context that it was sampled in.

An episode is one row while each prompt begins with all that stood before it. Where one does not, because a chat
template drops earlier thoughts or an agent edits its history, another row begins with that prompt: rows fork, and no
token is trained twice. Below are such rows read as one, and what is measured of them. Shapes: B rows, N tokens of a
piece, S of the longest row, T turns at most; E episodes, of R rows at most.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import EPISODE, digest_of_ids
from nemo_rl_mcore.data.turns import Ending, Reply
from nemo_rl_mcore.errors import RefusedError, RunStoppedError

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


def concatenate_batches(batches: Sequence[BatchedDataDict], pad_token_id: int) -> BatchedDataDict:
    """Return all rows of batches such as those of `Rollout`, padded to the longest.

    Each is given the columns that depend on its episodes, where another one has them. Where all were dropped, no reward
    has a name and nothing was sampled; where none has several rows, each row is one.
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
    return BatchedDataDict.from_batches(equal, {"input_ids": pad_token_id, WEIGHT_VERSIONS: -1})


def trained_columns(batch: BatchedDataDict) -> BatchedDataDict:
    """Return the batch without what is only recorded of its episodes, for the ranks."""
    kept = (name for name in batch if name not in _RECORDED and not name.startswith(REWARDS_PREFIX))
    return BatchedDataDict({name: batch[name] for name in kept})


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
    # Of the trained ids of each turn, [E, 1 + N]; turn 0 is of observations, which nobody sampled.
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
    found_EN = found.reshape(len(episodes), turns)
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


ENDING = "ending"
# What stands in the columns of tokens that a row did not sample.
_NOT_SAMPLED = {"token_mask": 0, "generation_logprobs": 0, WEIGHT_VERSIONS: -1, TURN_OF_TOKEN: 0}


def dropped_rows(batch: BatchedDataDict) -> Tensor:
    """Return bool [B]: the rows of episodes of which the environment said nothing; none without `ending`."""
    return batch[ENDING] == Ending.DROPPED if ENDING in batch else torch.zeros(batch.size, dtype=torch.bool)


def uncounted_rows(batch: BatchedDataDict) -> Tensor:
    """Return bool [B]: the rows of episodes that are dropped or not scored; none without `ending`."""
    return batch[ENDING] >= Ending.DROPPED if ENDING in batch else torch.zeros(batch.size, dtype=torch.bool)


def first_rows(batch: BatchedDataDict) -> list[int]:
    return [rows.start for rows in batch.samples()]


@dataclass(frozen=True)
class EpisodeRows:
    """Says where in a batch of B `rows` the episodes stand that count: all but those dropped or not scored.

    first: int64 [E], the first row of each. at: int64 [3, N], for each of their N rows the row, the episode's number
    and the row's place in it.
    """

    rows: int
    first: Tensor
    at: Tensor

    @classmethod
    def of(cls, batch: BatchedDataDict) -> Self:
        """Read `episode_index` and `ending` [B]; without them each row is an episode, and all count.

        Raises ValueError for rows of an episode that stand apart.
        """
        first = torch.tensor(first_rows(batch), dtype=torch.int64)
        counted = ~uncounted_rows(batch)[first]
        of_row = torch.zeros(batch.size, dtype=torch.int64).index_fill(0, first, 1).cumsum(0) - 1
        row = counted[of_row].nonzero().squeeze(1)
        episode = of_row[row]
        number = counted.cumsum(0)[episode] - 1
        return cls(batch.size, first[counted], torch.stack([row, number, row - first[episode]]))

    def one_each(self, values_B: Tensor) -> Tensor:
        """Return [E, ...], what stands on the first row of each."""
        return values_B[self.first]

    def joined(self, values_BS: Tensor, fill: float = 0) -> Tensor:
        """Return [E, R * S], the rows of each one after the other, then `fill`."""
        row, number, place = self.at
        joined = values_BS.new_full((len(self.first), self._most_rows, values_BS.shape[1]), fill)
        joined[number, place] = values_BS[row]
        return joined.flatten(1)

    def parted(self, values_ES: Tensor) -> Tensor:
        """Return [B, S], what `joined` has put together; 0 on the rows of episodes that do not count."""
        row, number, place = self.at
        parts = values_ES.reshape(len(self.first), self._most_rows, values_ES.shape[1] // self._most_rows)
        parted = values_ES.new_zeros(self.rows, parts.shape[2])
        parted[row] = parts[number, place]
        return parted

    def total(self, values_B: Tensor) -> Tensor:
        return self.joined(values_B.unsqueeze(1)).sum(1)

    def on_rows(self, values_E: Tensor) -> Tensor:
        """Return [B], the value of its episode on each row; 0 where that does not count."""
        row, number, _place = self.at
        values_B = values_E.new_zeros(self.rows)
        values_B[row] = values_E[number]
        return values_B

    @property
    def _most_rows(self) -> int:
        """R, 1 where no episode is left."""
        return int(self.at[2].max()) + 1 if self.at.numel() else 1


def as_rows(batch: BatchedDataDict, cuts: Sequence[Sequence[int]]) -> BatchedDataDict:
    """Part each row at its own columns, in order, into rows of one episode; no cut leaves it whole.

    A part repeats all tokens before it, and has as sampled those from the cut before on: each token is in one of them.
    What else a row has of its tokens and of itself stands on all of its parts. Columns after a part's input_lengths
    keep their ids. Raises ValueError for cuts that do not ascend inside the row.
    """
    bounds: list[tuple[int, int, int]] = []
    for row, (length, columns) in enumerate(zip(batch["input_lengths"].tolist(), cuts, strict=True)):
        ends = [*columns, length]
        if not all(start < end for start, end in pairwise([0, *ends])):
            raise RefusedError(
                f"row {row} of {length} tokens cannot be cut at {list(columns)}: allowed are 1 to "
                f"{length - 1}, ascending",
                code="row-cuts",
            )
        bounds += [(row, start, end) for start, end in pairwise([0, *ends])]
    rows, starts, ends = torch.tensor(bounds, dtype=torch.int64).view(-1, 3).t()
    parts = batch.select_indices(rows)
    parts.pop(RESPONSES, None)  # of the whole row
    parts[EPISODE] = batch.get(EPISODE, torch.arange(batch.size))[rows]
    parts["input_lengths"] = ends
    columns = torch.arange(parts["input_ids"].shape[1])
    own_BS = (columns >= starts.unsqueeze(1)) & (columns < ends.unsqueeze(1))
    for key, absent in _NOT_SAMPLED.items():
        if key in parts:
            parts[key] = parts[key].masked_fill(~own_BS, absent)
    return parts


def episode_metrics(batch: BatchedDataDict) -> dict[str, float]:
    """Return turns and how episodes ended, where there may be several turns; the means of rewards that have names.

    Episodes that are dropped or not scored count in how they ended alone, and one of several rows counts once. The
    share of those not scored is there where there are any.
    """
    episodes, metrics = EpisodeRows.of(batch), dict[str, float]()
    if ENDING in batch:
        endings = batch[ENDING][first_rows(batch)]
        for ending in Ending:
            rate = float((endings == ending).float().mean())
            if TURN_OF_TOKEN in batch or (ending is Ending.UNSCORED and rate):
                metrics[f"episodes/{ending.name.lower()}_rate"] = rate
    if not len(episodes.first):
        return metrics
    metrics |= {
        f"{name}_mean": float(episodes.one_each(column).mean())
        for name, column in batch.items()
        if name.startswith(REWARDS_PREFIX)
    }
    if TURN_OF_TOKEN not in batch:
        return metrics
    turns, mask = episodes.joined(batch[TURN_OF_TOKEN]).amax(1), batch["token_mask"]
    behind_prompt = (mask.cumsum(1) > 0) & (mask.flip(1).cumsum(1).flip(1) > 0)
    observed = episodes.total((behind_prompt & (mask == 0)).sum(1))
    return metrics | {
        "episodes/turns_mean": float(turns.float().mean()),
        "episodes/turns_max": float(turns.max()),
        "episodes/observation_tokens_mean": float(observed.float().mean()),
        "episodes/observations_cut": float(sum("cut" in reply for reply in _replies(batch))),
    }


def check_drops(
    step: int, batches: Sequence[BatchedDataDict], limit: float, reasons: Mapping[str, int]
) -> None:
    """Raise RunStoppedError when more than a share `limit` of a step's episodes, in [0, 1], was dropped.

    batches: all of the step. reasons: how often each one had an answer dropped, since the run began, besides those that
    stand in the batches; the most frequent one is named.
    """
    of_batches = [dropped_rows(batch)[first_rows(batch)] for batch in batches]
    dropped, episodes = sum(int(of_one.sum()) for of_one in of_batches), sum(map(len, of_batches))
    if dropped <= limit * episodes:
        return
    replies = (reply for batch in batches for reply in _replies(batch))
    reasons = {**Counter(reply["dropped"] for reply in replies if "dropped" in reply), **reasons}
    most = max(reasons, key=lambda reason: reasons[reason], default="")
    raise RunStoppedError(
        f"step {step}: {dropped} of {episodes} episodes ({dropped / episodes:.1%}) were dropped, to which the "
        f"environment gave no reply, or one that cannot be encoded; env.pool.max_drop_rate: {limit:g} is the most"
        + (f"; most often: {most} ({reasons[most]} answers since the run began)" if most else ""),
        code="too-many-dropped",
    )


def _replies(batch: BatchedDataDict) -> Iterator[dict[str, Any]]:
    """Yield what was said to each episode, once."""
    for row in first_rows(batch) if REPLIES in batch else ():
        yield from batch[REPLIES][row]


def age_metrics(batches: Sequence[BatchedDataDict], version: int, max_age: int) -> dict[str, float]:
    """Count the training steps by which the weights that sampled each token are behind `version`.

    batches: the chunks of a step; the versions of their tokens are weight_versions [B, S].

    async/age_<k> are shares of the tokens; async/mixed_versions is that of responses sampled by several versions.
    """
    drawn = [batch[WEIGHT_VERSIONS] for batch in batches]
    ages = torch.cat([(version - versions_BS)[versions_BS >= 0] for versions_BS in drawn])
    mixed: list[Tensor] = []
    for batch in batches:  # bool [E], the responses that weights of several versions sampled
        versions_ES = EpisodeRows.of(batch).joined(batch[WEIGHT_VERSIONS], fill=-1)
        newest = torch.iinfo(versions_ES.dtype).max
        mixed.append(versions_ES.masked_fill(versions_ES < 0, newest).amin(1) < versions_ES.amax(1))
    shares = {f"async/age_{age}": float((ages == age).float().mean()) for age in range(max_age + 1)}
    return shares | {
        "async/age_mean": float(ages.float().mean()),
        "async/age_max": float(ages.max()),
        "async/mixed_versions": float(torch.cat(mixed).float().mean()),
    }


@dataclass
class Pace:
    """Counts how the two sides of a run got on since the last step.

    began_at: when that one ended, by the monotonic clock. requeued, dropped: groups whose attempt ended without
    answers, by reason. trainer_idle_s: training waited for groups, to train on them or for them to end before an
    update. engine_idle_s: no group was in flight. ready, in_flight: groups at the end of the step. engine_restarts:
    since the run began.
    """

    began_at: float = field(default_factory=time.monotonic)
    requeued: Counter[str] = field(default_factory=Counter[str])
    dropped: Counter[str] = field(default_factory=Counter[str])
    trainer_idle_s: float = 0.0
    engine_idle_s: float = 0.0
    ready: int = 0
    in_flight: int = 0
    engine_restarts: int = 0
    rounds: int = 0
    """Times that groups were asked for in one call."""
    unused: int = 0
    """Groups that were answered and that dynamic sampling does not train on."""


def pace_metrics(pace: Pace, now: float) -> dict[str, float]:
    """Return the shares of the time since the last step in which one side waited, and what is under way now.

    now: by the clock of `pace.began_at`.
    """
    step_s = now - pace.began_at
    return {
        "async/trainer_idle": pace.trainer_idle_s / step_s,
        "async/engine_idle": pace.engine_idle_s / step_s,
        "async/buffer_ready": float(pace.ready),
        "async/inflight": float(pace.in_flight),
        **({"async/engine_restarts": float(pace.engine_restarts)} if pace.engine_restarts else {}),
        **{f"async/requeued/{reason}": float(count) for reason, count in pace.requeued.items()},
        **{f"async/dropped/{reason}": float(count) for reason, count in pace.dropped.items()},
    }
