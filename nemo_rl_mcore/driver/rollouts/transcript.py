"""Arrange episodes' tokens in rows, so that each sampled token follows the tokens that the engine sampled it from.

An episode is a single row as long as each prompt begins with all earlier tokens. If a prompt does not, because a chat
template drops earlier thoughts or an agent edits its history, a new row begins with that prompt. No token is trained
twice. `EpisodeRows` joins an episode's rows. Shapes: B rows, N tokens of a piece, S tokens of the longest row, T turns
at most, E episodes, R rows per episode at most.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import EPISODE, NO_ROUTE, ROUTED_EXPERTS, digest_of_ids
from nemo_rl_mcore.environment.turns import Ending, Reply
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
    """A prompt, an observation or an answer of N tokens; each column is an array, or one number for all tokens.

    Arrays, unlike lists, need no object per token. turn: 0 for a prompt or an observation.
    """

    ids_N: NDArray[Any]
    turn: int = 0
    logprobs_N: NDArray[Any] | float = 0.0
    versions_N: NDArray[Any] | int = -1


@dataclass
class Transcript:
    """An episode so far. rows: at least one. digests: one per answer. response: text of an episode's only answer.

    routes: for each row, the experts sent with its last answer, which include those of earlier answers.
    """

    prompt_index: int
    sample: int
    rows: list[list[Piece]]
    digests: list[int] = field(default_factory=list[int], kw_only=True)
    finished: bool = field(default=False, kw_only=True)
    """True if the last answer ended by itself."""
    response: str | None = field(default=None, kw_only=True)
    reward: float = field(default=0.0, kw_only=True)
    rewards: dict[str, float] = field(default_factory=dict[str, float], kw_only=True)
    replies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]], kw_only=True)
    ending: Ending | None = field(default=None, kw_only=True)
    routes: dict[int, NDArray[Any]] = field(default_factory=dict[int, NDArray[Any]], kw_only=True)

    def take(self, reply: Reply) -> None:
        self.reward += reply.reward
        for name, reward in reply.rewards.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + reward
        self.replies.append(reply.to_json())


def batch_of(
    episodes: Sequence[Transcript], *, pad_token_id: int, turns: int, digests: bool
) -> BatchedDataDict:
    """Return the rows of all episodes, in order, with the columns of `player.Rollout`.

    turns: maximum number of turns per episode. digests: True if the engine returns digests.
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
    if any(not isinstance(piece.versions_N, int) for row in rows for piece in row):
        batch[WEIGHT_VERSIONS] = padded(rows, lambda piece: piece.versions_N, -1)
    if digests:
        batch[SAMPLED_DIGESTS] = each(lambda one: one.digests + [0] * (turns - len(one.digests))).long()
    if any(episode.response is not None for episode in episodes):
        batch[RESPONSES] = [episodes[place].response for place in places]
    if any(episode.routes for episode in episodes):
        batch[ROUTED_EXPERTS] = _padded_routes(episodes, batch["input_ids"].shape[1])
    for name in sorted({name for episode in episodes for name in episode.rewards}):
        batch[f"{REWARDS_PREFIX}{name}"] = each(lambda one, name=name: one.rewards.get(name, 0.0))
    if len(rows) > len(episodes):
        batch[EPISODE] = of_row
    return batch


def _padded_routes(episodes: Sequence[Transcript], columns: int) -> torch.Tensor:
    """Return [B, S, L, K], with NO_ROUTE for tokens whose experts are not known."""
    example = next(routes for episode in episodes for routes in episode.routes.values())
    rows = [episode.routes.get(row) for episode in episodes for row in range(len(episode.rows))]
    padded_BSLK = np.full((len(rows), columns, *example.shape[1:]), NO_ROUTE, dtype=example.dtype)
    for padded_SLK, routes in zip(padded_BSLK, rows, strict=True):
        if routes is not None:
            padded_SLK[: len(routes)] = routes
    return torch.from_numpy(padded_BSLK)  # pyright: ignore[reportUnknownMemberType]


def padded(
    rows: Sequence[Sequence[Piece]], values: Callable[[Piece], NDArray[Any] | float], fill: float
) -> torch.Tensor:
    """Return [B, S], one value per token, padded on the right with `fill`: fp32 if `fill` is a float, else int64."""
    padded_BS = torch.full((len(rows), max(map(tokens_of, rows))), fill)
    for padded_S, row in zip(padded_BS.numpy(), rows, strict=True):
        start = 0
        for piece in row:
            padded_S[start : start + len(piece.ids_N)] = values(piece)
            start += len(piece.ids_N)
    return padded_BS


def tokens_of(row: Sequence[Piece]) -> int:
    return sum(len(piece.ids_N) for piece in row)


def concatenate_batches(batches: Sequence[BatchedDataDict], pad_token_id: int) -> BatchedDataDict:
    """Return all rows of several rollouts' batches, padded to the longest row.

    Optional columns that only some batches have are added to the others. For example, a batch of dropped episodes lacks
    named rewards and weight versions, and a batch of single-row episodes lacks `episode_index`.
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
    """Return the batch without columns that are only recorded, to be sent to the ranks."""
    kept = (name for name in batch if name not in _RECORDED and not name.startswith(REWARDS_PREFIX))
    return BatchedDataDict({name: batch[name] for name in kept})


def require_sampled_ids(batch: BatchedDataDict) -> None:
    """Check that trained tokens were sampled, by comparing their ids with the digests that engines took when sampling.

    Ids under token_mask are compared turn by turn with sampled_digests int64 [B, turns], which are 0 for no answer.
    Without turn_of_token, there is one turn; without sampled_digests, nothing is compared, as some engines return none.
    An episode's rows are compared together. Raises RunStoppedError, naming the first answer that differs.
    """
    if SAMPLED_DIGESTS not in batch:
        return
    episodes = batch.samples()
    sampled_EN: NDArray[np.int64] = batch[SAMPLED_DIGESTS].numpy()[[rows.start for rows in episodes]]
    # Turn 0 marks observations, which were not sampled.
    mask_BS: NDArray[np.bool_] = batch["token_mask"].numpy() != 0
    turns_BS: NDArray[np.int64] = batch.get(TURN_OF_TOKEN, batch["token_mask"].long()).numpy()
    episode_of_row = np.repeat(np.arange(len(episodes)), [len(rows) for rows in episodes])
    # Group all trained tokens by episode and turn, keeping their order.
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


def dropped_rows(batch: BatchedDataDict) -> Tensor:
    """Return bool [B], True for rows of dropped episodes; all False if the batch has no `ending`."""
    return batch[ENDING] == Ending.DROPPED if ENDING in batch else torch.zeros(batch.size, dtype=torch.bool)


def uncounted_rows(batch: BatchedDataDict) -> Tensor:
    """Return bool [B], True for rows of episodes that are dropped or not scored; all False if there is no `ending`."""
    return batch[ENDING] >= Ending.DROPPED if ENDING in batch else torch.zeros(batch.size, dtype=torch.bool)


def first_rows(batch: BatchedDataDict) -> list[int]:
    return [rows.start for rows in batch.samples()]


@dataclass(frozen=True)
class EpisodeRows:
    """The rows of counted episodes, which are neither dropped nor unscored, in a batch of B `rows`.

    first: int64 [E], each counted episode's first row. at: int64 [3, N], for each of their N rows, the row's index in
    the batch, its episode's number and its place in the episode. most: R, or 1 if no episode counts.
    """

    rows: int
    first: Tensor
    at: Tensor
    most: int

    @classmethod
    def of(cls, batch: BatchedDataDict) -> Self:
        """Read `episode_index` and `ending` [B]; without them, each row is an episode, and all episodes count.

        Raises ValueError if an episode's rows are not adjacent.
        """
        first = torch.tensor(first_rows(batch), dtype=torch.int64)
        counted = ~uncounted_rows(batch)[first]
        of_row = torch.zeros(batch.size, dtype=torch.int64).index_fill(0, first, 1).cumsum(0) - 1
        row = counted[of_row].nonzero().squeeze(1)
        episode = of_row[row]
        number = counted.cumsum(0)[episode] - 1
        place = row - first[episode]
        most = int(place.max()) + 1 if place.numel() else 1
        return cls(batch.size, first[counted], torch.stack([row, number, place]), most)

    def joined(self, values_BS: Tensor, fill: float = 0) -> Tensor:
        """Return [E, R * S]: each episode's rows joined end to end and padded with `fill`."""
        row, number, place = self.at
        joined = values_BS.new_full((len(self.first), self.most, values_BS.shape[1]), fill)
        joined[number, place] = values_BS[row]
        return joined.flatten(1)

    def parted(self, values_ES: Tensor) -> Tensor:
        """Return [B, S], the inverse of `joined`; rows of episodes that do not count are 0."""
        row, number, place = self.at
        parts = values_ES.reshape(len(self.first), self.most, values_ES.shape[1] // self.most)
        parted = values_ES.new_zeros(self.rows, parts.shape[2])
        parted[row] = parts[number, place]
        return parted

    def total(self, values_B: Tensor) -> Tensor:
        return self.joined(values_B.unsqueeze(1)).sum(1)

    def on_rows(self, values_E: Tensor) -> Tensor:
        """Return [B]: each row gets its episode's value, or 0 if the episode does not count."""
        row, number, _place = self.at
        values_B = values_E.new_zeros(self.rows)
        values_B[row] = values_E[number]
        return values_B


def episode_metrics(batch: BatchedDataDict) -> dict[str, float]:
    """Return mean named rewards and, if episodes may have several turns, metrics of turns and endings.

    Episodes that are dropped or not scored count only in the endings' rates, and an episode with several rows counts
    once. A nonzero rate of unscored episodes is returned even for single-turn episodes.
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
        f"{name}_mean": float(column[episodes.first].mean())
        for name, column in batch.items()
        if name.startswith(REWARDS_PREFIX)
    }
    if TURN_OF_TOKEN not in batch:
        return metrics
    turns, mask = episodes.joined(batch[TURN_OF_TOKEN]).amax(1), batch["token_mask"]
    behind_prompt = (mask.cumsum(1) > 0) & (mask.flip(1).cumsum(1).flip(1) > 0)
    observed = episodes.total((behind_prompt & (mask == 0)).sum(1))
    flaws = Counter(flaw for reply in episode_replies(batch) for flaw in reply.get("flaws", ()))
    return (
        metrics
        | {f"episodes/{flaw}": float(count) for flaw, count in flaws.items()}
        | {
            "episodes/turns_mean": float(turns.float().mean()),
            "episodes/turns_max": float(turns.max()),
            "episodes/observation_tokens_mean": float(observed.float().mean()),
            "episodes/observations_cut": float(sum("cut" in reply for reply in episode_replies(batch))),
        }
    )


def episode_replies(batch: BatchedDataDict) -> Iterator[dict[str, Any]]:
    """Yield all replies, without repeating those of episodes with several rows."""
    for row in first_rows(batch) if REPLIES in batch else ():
        yield from batch[REPLIES][row]


def age_metrics(batches: Sequence[BatchedDataDict], version: int, max_age: int) -> dict[str, float]:
    """Return metrics of token ages: the number of steps by which the weights that sampled a token are behind `version`.

    batches: a step's chunks. async/age_<k>: share of tokens with age k. async/mixed_versions: share of responses that
    were sampled by several versions.
    """
    drawn = [batch[WEIGHT_VERSIONS] for batch in batches]
    ages = torch.cat([(version - versions_BS)[versions_BS >= 0] for versions_BS in drawn])
    mixed: list[Tensor] = []
    for batch in batches:
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
    """Measurements of training and sampling since the last step.

    began_at: monotonic time of the last step's end. requeued, dropped: attempts without answers, by reason.
    trainer_idle_s: seconds for which training waited for groups, to train on them or to update weights.
    engine_idle_s: seconds without a group in flight. ready, in_flight: groups at the step's end. engine_restarts:
    restarts since the run began. rounds: synchronous generation rounds. unused: groups that dynamic sampling discarded.
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
    unused: int = 0


def pace_metrics(pace: Pace, now: float) -> dict[str, float]:
    """Return each side's share of idle time since the last step, and counts of groups. now: monotonic time."""
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
