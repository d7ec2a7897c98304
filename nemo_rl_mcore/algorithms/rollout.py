"""Turn prompts into scored rows that can be trained on.

Shapes: B rows (prompts x samples), P longest prompt, T new tokens, S = longest prompt with its response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.interfaces import EnvironmentInterface, GenerationInterface
from nemo_rl_mcore.observability import Sample


@dataclass(frozen=True)
class Rollout:
    """Answered and scored prompts, row by row.

    batch: input_ids [B, S], input_lengths [B], token_mask [B, S] (1 on response tokens), sample_mask [B],
    generation_logprobs [B, S], finished bool [B], prompt_index and sample_index [B], and, once scored, rewards [B].
    """

    batch: BatchedDataDict
    prompts: list[Prompt]
    responses: list[str]

    def select(self, rows: Sequence[int]) -> Rollout:
        """These rows, in this order."""
        return Rollout(
            self.batch.select_indices(rows),
            [self.prompts[i] for i in rows],
            [self.responses[i] for i in rows],
        )

    def one_sample_a_prompt(self, step: int) -> list[Sample]:
        """The first answer to each prompt, for people to read."""
        first_rows = [row for row, index in enumerate(self.batch["sample_index"].tolist()) if index == 0]
        return [
            Sample(
                step=step,
                prompt=self.prompts[row].text,
                answer=self.prompts[row].answer,
                response=self.responses[row],
                reward=float(self.batch["rewards"][row]),
                finished=bool(self.batch["finished"][row]),
            )
            for row in first_rows
        ]

    @staticmethod
    def concatenate(parts: Sequence[Rollout], pad_token_id: int) -> Rollout:
        """All rows of the parts, padded to the longest."""
        return Rollout(
            BatchedDataDict.from_batches([part.batch for part in parts], {"input_ids": pad_token_id}),
            [prompt for part in parts for prompt in part.prompts],
            [response for part in parts for response in part.responses],
        )


@dataclass(frozen=True)
class Responder:
    """Asks a generation engine for responses."""

    generation: GenerationInterface
    tokenizer: Tokenizer
    max_prompt_length: int

    def respond(self, prompts: Sequence[Prompt], samples: int, *, step: int, greedy: bool = False) -> Rollout:
        """Answer each prompt `samples` times, without rewards; the rows of a prompt stand together.

        Raises ValueError, naming the prompt and the key, when a prompt is longer than the maximum.
        """
        ids = [self._encode(prompt) for prompt in prompts]
        asked = self._as_batch(prompts, ids).repeat_interleave(samples)
        asked["sample_index"] = torch.arange(samples).repeat(len(prompts))
        answered = self.generation.generate(asked, step=step, greedy=greedy)
        tokens, lengths = answered["tokens"].tolist(), answered["lengths"].tolist()
        responses = [self.tokenizer.decode(row[:length]) for row, length in zip(tokens, lengths, strict=True)]
        rows = [prompt for prompt in prompts for _ in range(samples)]
        return Rollout(self._join(asked, answered), rows, responses)

    def _encode(self, prompt: Prompt) -> list[int]:
        ids = self.tokenizer.encode(prompt.text)
        if not 0 < len(ids) <= self.max_prompt_length:
            raise ValueError(
                f"prompt {prompt.index} has {len(ids)} tokens; prompts must have 1 to {self.max_prompt_length}: "
                f"shorten it or raise data.max_input_seq_length ({prompt.text[:80]!r})"
            )
        return ids

    def _as_batch(self, prompts: Sequence[Prompt], ids: list[list[int]]) -> BatchedDataDict:
        lengths = torch.tensor([len(row) for row in ids])
        input_ids = torch.full((len(ids), int(lengths.max())), self.tokenizer.pad_token_id)
        for row, tokens in enumerate(ids):
            input_ids[row, : len(tokens)] = torch.tensor(tokens)
        indices = torch.tensor([prompt.index for prompt in prompts])
        return BatchedDataDict(input_ids=input_ids, input_lengths=lengths, prompt_index=indices)

    def _join(self, asked: BatchedDataDict, answered: BatchedDataDict) -> BatchedDataDict:
        """Each response right behind its prompt, then the padding."""
        prompt_lengths, new = asked["input_lengths"], answered["lengths"]
        total = prompt_lengths + new
        columns = torch.arange(int(total.max())).unsqueeze(0)
        in_response = (columns >= prompt_lengths.unsqueeze(1)) & (columns < total.unsqueeze(1))
        in_prompt = columns < prompt_lengths.unsqueeze(1)
        source = (columns - prompt_lengths.unsqueeze(1)).clamp(0, answered["tokens"].shape[1] - 1)
        prompt_ids = asked["input_ids"].gather(
            1, columns.expand_as(source).clamp(max=asked["input_ids"].shape[1] - 1)
        )
        padding = torch.full_like(source, self.tokenizer.pad_token_id)
        response_ids = torch.where(in_response, answered["tokens"].gather(1, source), padding)
        logprobs = answered["logprobs"].gather(1, source).masked_fill(~in_response, 0.0)
        return BatchedDataDict(
            input_ids=torch.where(in_prompt, prompt_ids, response_ids),
            input_lengths=total,
            token_mask=in_response.float(),
            sample_mask=torch.ones(len(total)),
            generation_logprobs=logprobs,
            finished=answered["finished"],
            prompt_index=asked["prompt_index"],
            sample_index=asked["sample_index"],
        )


@dataclass(frozen=True)
class RolloutCollector(Responder):
    """Asks a generation engine for responses and an environment for rewards."""

    environment: EnvironmentInterface

    def collect(self, prompts: Sequence[Prompt], samples: int, *, step: int, greedy: bool = False) -> Rollout:
        """Answer each prompt `samples` times, as `respond` does, and score the answers."""
        rollout = self.respond(prompts, samples, step=step, greedy=greedy)
        finished = rollout.batch["finished"].tolist()
        rewards = self.environment.score(rollout.prompts, rollout.responses, finished)
        rollout.batch["rewards"] = torch.tensor([float(reward) for reward in rewards])
        return rollout
