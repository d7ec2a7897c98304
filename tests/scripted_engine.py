"""A `Respond` for tests: draws ids from the key of the noise alone, as an engine does, and notes what it drew."""

import asyncio

import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import digests_of_rows

LONGEST = 6


class Drawing:
    """Answers rows; waits for `gate` first. versions: of the weights, None where they are not told."""

    def __init__(self, vocabulary=50, version=3, delay=0.0):
        self.vocabulary, self.version, self.delay = vocabulary, version, delay
        self.asked, self.error = [], None
        self.gate = asyncio.Event()
        self.gate.set()

    def answer(self, asked):
        keys = zip(
            *(asked[key].tolist() for key in ("prompt_index", "sample_index", "turn_index")), strict=True
        )
        tokens = torch.zeros(asked.size, LONGEST, dtype=torch.long)
        logprobs, lengths = torch.zeros(asked.size, LONGEST), []
        for row, key in enumerate(keys):
            generator = torch.Generator().manual_seed(hash(key) % 2**63)
            tokens[row] = torch.randint(0, self.vocabulary, (LONGEST,), generator=generator)
            logprobs[row] = -torch.rand(LONGEST, generator=generator)
            lengths.append(int(torch.randint(1, LONGEST + 1, (), generator=generator)))
        lengths = torch.tensor(lengths)
        answered = BatchedDataDict(
            tokens=tokens,
            logprobs=logprobs,
            lengths=lengths,
            finished=lengths < LONGEST,
            digests=digests_of_rows(tokens, lengths),
        )
        if self.version is not None:
            answered["weight_versions"] = torch.full_like(tokens, self.version)
        return answered

    async def __call__(self, asked):
        self.asked.append(asked)
        await asyncio.sleep(self.delay)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.answer(asked)
