"""The evaluation itself: every set is asked batch by batch, and each batch is on disk before the next one is asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import batched
from pathlib import Path

from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.turns import first_turn
from nemo_rl_mcore.driver.rollouts.player import Responder, Rollout
from nemo_rl_mcore.environment.interface import Environment
from nemo_rl_mcore.environment.replies import replies_of
from nemo_rl_mcore.environment.votes import votes_of
from nemo_rl_mcore.tools.evaluate.folder import RESULTS_FILE, write_json, writing_to
from nemo_rl_mcore.tools.evaluate.metrics import Estimate, set_metrics
from nemo_rl_mcore.tools.evaluate.samples import SampleFile, SampleRow

_NOISE_STEP = 0
"""The step in the key of the sampling noise, which then is one of prompt and sample alone."""


@dataclass(frozen=True)
class SetResult:
    """What a set amounts to."""

    prompts: int
    samples: int
    metrics: Mapping[str, Estimate]


@dataclass(frozen=True)
class Evaluator:
    """Answers sets of prompts into a folder.

    samples: answers to each prompt. batch_size: prompts that the engine is asked together. k_values: of pass@k, maj@k.
    start: gives what answers; it is called once a prompt is left to be asked. notify: told of each batch.
    """

    folder: Path
    environment: Environment
    start: Callable[[], Responder]
    samples: int
    batch_size: int
    k_values: Sequence[int]
    greedy: bool
    notify: Callable[[str], None]

    def evaluate(self, sets: Mapping[str, Sequence[Prompt]]) -> dict[str, SetResult]:
        """Ask what is not on disk yet, and write the results.

        Raises FolderError where the folder cannot be written to, and what engine and environment raise.
        """
        results = {name: self._result(self._rows(name, prompts)) for name, prompts in sets.items()}
        told = {name: asdict(result) for name, result in results.items()}
        with writing_to(self.folder):
            write_json(self.folder / RESULTS_FILE, told)
        return results

    def _rows(self, name: str, prompts: Sequence[Prompt]) -> list[SampleRow]:
        """Return the rows of a set: those on disk, then those that are asked now."""
        batches = [*batched(prompts, self.batch_size)]
        keys = [(prompt.index, sample) for prompt in prompts for sample in range(self.samples)]
        file = SampleFile(
            self.folder / f"{name}.jsonl", keys, [len(batch) * self.samples for batch in batches]
        )
        with writing_to(self.folder):
            rows = file.go_on()
        if rows:
            self.notify(f"{name}: {len(rows)} of {len(keys)} samples are there")
        for batch in batches[math.ceil(len(rows) / (self.batch_size * self.samples)) :]:
            new = self._ask(batch)
            with writing_to(self.folder):
                file.append(new)
            rows += new
            self.notify(f"{name}: {len(rows)} of {len(keys)} samples, mean reward {_mean_reward(rows):.4g}")
        return rows

    def _ask(self, prompts: Sequence[Prompt]) -> list[SampleRow]:
        rollout = self.start().respond(prompts, self.samples, step=_NOISE_STEP, greedy=self.greedy)
        finished = rollout.batch["finished"].tolist()
        answers = zip(rollout.prompts, rollout.responses, finished, strict=True)
        turns = [first_turn(prompt, response, finished=ended) for prompt, response, ended in answers]
        replies = replies_of(self.environment, turns, {})
        votes = [
            vote
            for responses in batched(rollout.responses, self.samples)
            for vote in votes_of(self.environment, responses)
        ]
        return [
            _row(rollout, place, reply.reward, vote.answer, vote.first)
            for place, (reply, vote) in enumerate(zip(replies, votes, strict=True))
        ]

    def _result(self, rows: Sequence[SampleRow]) -> SetResult:
        scored = [[row.scored for row in samples] for samples in batched(rows, self.samples)]
        return SetResult(len(scored), self.samples, set_metrics(scored, self.k_values))


def _row(rollout: Rollout, place: int, reward: float, answer: str | None, vote: int | None) -> SampleRow:
    prompt = rollout.prompts[place]
    return SampleRow(
        index=prompt.index,
        sample=int(rollout.batch["sample_index"][place]),
        prompt=prompt.text,
        response=rollout.responses[place],
        reward=reward,
        answer=answer,
        gold=prompt.answer,
        tokens=int(rollout.batch["token_mask"][place].sum()),
        finished=bool(rollout.batch["finished"][place]),
        vote=vote,
    )


def _mean_reward(rows: Sequence[SampleRow]) -> float:
    return math.fsum(row.reward for row in rows) / len(rows)
