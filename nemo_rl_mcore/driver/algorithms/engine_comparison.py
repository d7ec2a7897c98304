"""Compare the engines' next-token log-probabilities with training's, over the whole vocabulary, for a few prompts.

A verified refit proves that an engine holds training's weights; this comparison also covers how the engine uses them:
rotary embedding, norms, heads, temperature, number format. Shapes: N prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from nemo_rl_mcore.config import PolicyConfig, RunConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.errors import RunStoppedError

if TYPE_CHECKING:
    from nemo_rl_mcore.driver.actors.engine_generation import EngineGeneration


class Bounds(NamedTuple):
    """The largest log-probability difference and KL divergence, in nats, that a number format explains."""

    difference: float
    kl: float


# Measured on CPU with random weights, comparing engines with ranks. In float32, differences reach 2e-6 for the embedded
# engine and 9e-6 for vLLM (2e-4 with large logits); an epsilon of 1e-6 instead of 1e-5 causes 1e-3. In bfloat16, vLLM
# rounds its logits: unlikely tokens differ by up to 0.16, but KL stays below 1e-3; a wrong temperature causes 0.05.
BOUNDS: Mapping[str, Bounds] = {"float32": Bounds(1e-3, 1e-4), "bfloat16": Bounds(1.0, 0.02)}
"""Bounds by the coarser of both sides' number formats."""

_WHERE_TO_LOOK = (
    "Unless policy.generation.verify_refit is false the engine holds the weights of training: look at what it makes of "
    "them, rotary base and scaling, epsilon of the norms, sizes of the heads (policy.model), the temperature, and the "
    "number format (policy.generation.vllm_cfg.precision). policy.generation.compare_at_start: false leaves this out"
)
_PROMPTS = 4
_LOGITS = 1 << 25
"""Limit on a prompt's tokens times the vocabulary size: training computes all these logits, at 12 bytes each."""


class EnginesDifferError(RunStoppedError):
    """An engine's log-probabilities differ from training's by more than the number format explains."""


@dataclass(frozen=True)
class Comparison:
    """The largest difference between an engine and training: after prompt `row` of `length` tokens, at `token`.

    largest: absolute difference of log-probabilities, infinite if either is NaN. kl: largest KL divergence between
    training and any engine, in nats.
    """

    rows: int
    vocabulary: int
    largest: float
    kl: float
    engine: int
    row: int
    length: int
    token: int
    by_engine: float
    by_training: float

    def require(self, allowed: Bounds) -> str:
        """Return a line that reports agreement; raise EnginesDifferError if the bounds are exceeded."""
        if self.largest <= allowed.difference and self.kl <= allowed.kl:
            return (
                f"engine and training agree on {self.rows} rows x {self.vocabulary} tokens: largest difference of "
                f"log-probability {self.largest:.3g}, KL {self.kl:.3g}"
            )
        raise EnginesDifferError(
            f"engine {self.engine} and training disagree about what follows row {self.row} ({self.length} tokens): "
            f"token {self.token} has the log-probability {self.by_engine:.6g} by the engine and "
            f"{self.by_training:.6g} by training; this difference of {self.largest:.3g} is the largest "
            f"({allowed.difference:.3g} is allowed), KL is {self.kl:.3g} ({allowed.kl:.3g}). {_WHERE_TO_LOOK}",
            code="logprobs-differ",
        )


def compare(
    policy: Policy,
    engines: EngineGeneration,
    prompts: Sequence[Sequence[int]],
    *,
    vocabulary: int,
    temperature: float,
) -> Comparison:
    """Compare the policy with engines that hold its weights, after each prompt, over the whole vocabulary.

    temperature: the divisor of both sides' logits. The comparison changes neither side and draws no noise. Raises
    EnginesDifferError for an engine with a different vocabulary size.
    """
    # Training computes logits only where a token follows; any token works, as positions do not see later tokens.
    trained_NV = torch.full((len(prompts), vocabulary), torch.nan, dtype=torch.float64)
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt, prompt[-1]]])
        batch = BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([ids.shape[1]]))
        given, last = policy.get_topk_logits(batch, vocabulary), len(prompt) - 1
        logits, total = given["topk_logits"][0, last].double(), given["logsumexp"][0, last].double()
        trained_NV[row, given["topk_indices"][0, last]] = logits - total
    found: list[Comparison] = []
    for engine, answered in enumerate(engines.next_logprobs(prompts, temperature)):
        for of_prompt in answered:
            if len(of_prompt) != vocabulary:
                raise EnginesDifferError(
                    f"engine {engine} has a vocabulary of {len(of_prompt)} tokens, and policy.model.vocab_size is "
                    f"{vocabulary}",
                    code="vocabularies-differ",
                )
        answered_NV = torch.tensor(np.stack(answered), dtype=torch.float64)
        difference_NV = (answered_NV - trained_NV).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        row, token = divmod(int(difference_NV.argmax()), vocabulary)
        # Renormalize: fp32 probabilities over a large vocabulary do not sum to one, which would hide small divergences.
        p_NV, q_NV = trained_NV.log_softmax(-1), answered_NV.log_softmax(-1)
        divergence_N = (p_NV.exp() * (p_NV - q_NV)).sum(-1)
        found.append(
            Comparison(
                rows=len(prompts),
                vocabulary=vocabulary,
                largest=float(difference_NV[row, token]),
                kl=float(divergence_N.max()),
                engine=engine,
                row=row,
                length=len(prompts[row]),
                token=token,
                by_engine=float(answered_NV[row, token]),
                by_training=float(trained_NV[row, token]),
            )
        )
    worst = max(found, key=lambda comparison: comparison.largest)
    return replace(worst, kl=max(comparison.kl for comparison in found))


def compare_at_start(
    config: RunConfig, policy: Policy, engines: EngineGeneration, prompts: Sequence[Sequence[int]]
) -> str:
    """Compare as `compare` does, and return a line that reports agreement; raise EnginesDifferError."""
    vocabulary, temperature = config.policy.model.vocab_size, config.logprob_sampling.temperature
    found = compare(policy, engines, prompts, vocabulary=vocabulary, temperature=temperature)
    return found.require(bounds_of(config.policy))


def bounds_of(policy: PolicyConfig) -> Bounds:
    own, generation = policy.precision, policy.generation
    if generation.backend == "vllm":
        own = generation.vllm_cfg.number_format(policy.precision)
    both = BOUNDS[policy.precision], BOUNDS[own]
    return max(both, key=lambda bounds: bounds.difference)


def rows_to_compare(config: RunConfig, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of the first few prompts, each cut to the length that both sides support."""
    longest = min(
        config.policy.max_total_sequence_length - 1, max(1, _LOGITS // config.policy.model.vocab_size)
    )
    encoded = (tokenizer.encode(prompt.text, prompt.literal) for prompt in prompts[:_PROMPTS])
    return [ids[:longest] or [tokenizer.eos_token_id] for ids in encoded]
