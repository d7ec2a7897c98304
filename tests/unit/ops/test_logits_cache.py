"""What the forward leaves to the backward: the bits stay the same, the budget is kept, the memory is given back."""

import gc
from dataclasses import replace

import pytest
import torch
from operators import Recorder
from torch import Tensor

from nemo_rl_mcore.config.megatron import LOGITS_CACHE as AUTO
from nemo_rl_mcore.ops._head import LogitsCache
from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions, fused_linear_logprobs
from nemo_rl_mcore.ops.linear_logprobs_at import linear_logprobs_at

TOKENS, HIDDEN, VOCAB, K = 32, 8, 2048, 3
PLAIN = LinearLogprobsOptions(
    chunk_bytes=8 << 10
)  # eight panels of 256 columns, in two chunks of rows or more
AUTO_OPTIONS = replace(PLAIN, cache_bytes=AUTO.limit, cache_bytes_per_logit=AUTO.bytes_per_logit)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
GRAD = torch.sin(torch.arange(1.0, TOKENS + 1)).view(TOKENS, 1)


def head_outputs(options, dtype, mask=None, at_ids=False) -> tuple[list[Tensor], list[Tensor]]:
    """(outputs, leaves) of one of the two functions."""
    noise = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=noise).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=noise).to(dtype).requires_grad_()
    ids = torch.rand(TOKENS, 1, VOCAB, generator=noise).argsort(-1)[..., :K]
    arguments = {"temperature": 0.7, "mask": mask, "options": options}
    if at_ids:
        out = linear_logprobs_at(hidden, weight, ids, with_tail=True, **arguments)
    else:
        out = fused_linear_logprobs(hidden, weight, ids[..., 0], with_entropy=True, **arguments)
    return [*out], [hidden, weight]


def gradients(options, dtype, at_ids=False) -> list[Tensor]:
    outputs, leaves = head_outputs(options, dtype, at_ids=at_ids)
    return list(torch.autograd.grad(sum((x.flatten(1) * GRAD).sum() for x in outputs), leaves))


def held() -> list[Tensor]:
    """Every panel that any cache of this process holds."""
    caches = [x for x in gc.get_objects() if type(x) is LogitsCache]
    return [panel for cache in caches for panel in cache._panels.values()]


def held_bytes() -> int:
    return sum(panel.untyped_storage().nbytes() for panel in held())


@pytest.mark.parametrize("at_ids", [False, True], ids=["targets", "ids"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [AUTO_OPTIONS, replace(PLAIN, cache_bytes=1 << 30)], ids=["auto", "all"])
def test_no_bit_of_a_gradient_depends_on_the_cache(options, dtype, at_ids):
    expected = gradients(PLAIN, dtype, at_ids)
    assert all(gradient.abs().max() > 0 for gradient in expected)
    actual = gradients(options, dtype, at_ids)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("masked", [False, True], ids=["all rows", "half of the rows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_auto_keeps_panels_of_one_byte_for_each_logit_of_the_trained_rows(dtype, masked):
    mask = torch.arange(TOKENS).view(TOKENS, 1) % 2 if masked else None
    outputs, _ = head_outputs(AUTO_OPTIONS, dtype, mask)
    rows = TOKENS // 2 if masked else TOKENS
    assert held_bytes() == rows * VOCAB
    assert {tuple(panel.shape) for panel in held()} == {(rows, 256)}
    del outputs
    assert held() == []


def test_auto_stays_below_its_limit():
    outputs, _ = head_outputs(replace(AUTO_OPTIONS, cache_bytes=3 * TOKENS * 256 * 2), torch.bfloat16)
    assert len(held()) == 3
    del outputs


def test_auto_never_keeps_the_only_panel():
    outputs, _ = head_outputs(replace(AUTO_OPTIONS, chunk_size=4), torch.bfloat16)
    assert held() == []
    del outputs


def test_a_backward_gives_the_memory_back_and_leaves_a_second_one_its_bits():
    outputs, leaves = head_outputs(AUTO_OPTIONS, torch.float32)
    first = torch.autograd.grad(outputs[0], leaves, GRAD, retain_graph=True)
    assert held() == []
    second = torch.autograd.grad(outputs[0], leaves, GRAD)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rows_without_gradient_are_left_out_without_a_copy_of_the_panel():
    options = LinearLogprobsOptions(chunk_size=4, cache_bytes=1 << 30)
    outputs, leaves = head_outputs(options, torch.float32)
    grad = torch.where(torch.arange(TOKENS).view(TOKENS, 1) % 8 == 0, 0.0, GRAD)
    with Recorder() as seen:
        torch.autograd.grad(outputs[0], leaves, grad)
    assert max(shape.numel() for shape in seen.new if shape[-1:] == (VOCAB,)) == 4 * VOCAB
