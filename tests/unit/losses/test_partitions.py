"""Properties of every loss.

However a batch is cut, the parts add up to the whole, metrics and gradients too; an episode whose tokens are in
several rows has the sums of the one row that has them all; masked positions never matter; sums read no value.
"""

import math
import pickle
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parted_rows import as_rows
from torch import Tensor

from nemo_rl_mcore.config import DistillationLossConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import (
    ClippedPGLossFn,
    DistillationLossFn,
    DistillationOutputs,
    DPOLossFn,
    MetricKind,
    MseValueLossFn,
    NLLLossFn,
    TokenOutputs,
    TopKLogprobs,
    ValueOutputs,
)
from nemo_rl_mcore.losses.base import valid_counts

ROWS, VOCABULARY, K = 8, 9, 4

CORRECTED = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.2}
BOUNDED = CORRECTED | {"truncated_importance_sampling_ratio_min": 0.8}
PER_ROW = {"token_level_loss": False}
CLIPPED = {
    "GRPO": {},
    "GRPO by rows": PER_ROW,
    "DAPO": {"ratio_clip_max": 0.28, "reference_policy_kl_penalty": 0.0},
    "dual clip": {"ratio_clip_c": 1.1},
    "GSPO, corrected": PER_ROW
    | CORRECTED
    | {"sequence_level_importance_ratios": True, "truncated_importance_sampling_type": "tis"},
    "CISPO": {"use_cispo": True},
    "REINFORCE": {"disable_ppo_ratio": True},
    "on policy, with entropy": {"force_on_policy_ratio": True, "entropy_coef": 0.1},
    "icepop": BOUNDED | {"truncated_importance_sampling_type": "icepop"},
    "KL to the sampler, clamped": {"use_on_policy_kl_approximation": True, "kl_output_clamp_value": 0.1}
    | {"kl_input_clamp_value": 0.3, "reference_policy_kl_penalty": 0.5},
    "seq-mask-tis by rows": PER_ROW | BOUNDED | {"truncated_importance_sampling_type": "seq-mask-tis"},
}
LOSSES = {
    **{name: ClippedPGLossFn(keys) for name, keys in CLIPPED.items()},
    "NLL": NLLLossFn(),
    "DPO": DPOLossFn({"sft_loss_weight": 0.3}),
    "DPO, means": DPOLossFn(
        {"preference_average_log_probs": True, "sft_loss_weight": 0.3, "sft_average_log_probs": True}
    ),
    "critic": MseValueLossFn({"cliprange": 0.2}),
    **{
        f"distillation, {kind}": DistillationLossFn(DistillationLossConfig.model_validate({"kl_type": kind}))
        for kind in ("forward", "reverse", "mixed", "jsd")
    },
    "distillation, no tail": DistillationLossFn(DistillationLossConfig(tail_mass=False)),
    "distillation, with policy gradient": DistillationLossFn(DistillationLossConfig(rl_weight=0.5)),
}


@dataclass(frozen=True)
class Case:
    """A batch with everything that any loss reads; `leaves` are what gradients are taken for."""

    data: BatchedDataDict
    outputs: Any
    leaves: list[Tensor]


def case_of(loss_fn, make_batch, seed):
    current, data = make_batch(rows=ROWS, columns=5, seed=seed)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    data["values"], data["returns"] = normal(ROWS, 5), normal(ROWS, 5)
    entropy = data["entropy"][:, 1:].clone().requires_grad_()
    tokens = TokenOutputs(current, entropy)
    if isinstance(loss_fn, MseValueLossFn):
        values = (data["values"] + 0.3 * normal(ROWS, 5)).requires_grad_()
        return Case(data, ValueOutputs(values), [values])
    if isinstance(loss_fn, DistillationLossFn):
        student, teacher = (normal(ROWS, 4, VOCABULARY).requires_grad_() for _ in range(2))
        said = [TopKLogprobs(logits.log_softmax(-1)[..., :K]) for logits in (student, teacher)]
        return Case(data, DistillationOutputs(*said, tokens), [student, current])
    if isinstance(loss_fn, DPOLossFn):  # a pair is kept or dropped as one
        data["sample_mask"] = data["sample_mask"][::2].repeat_interleave(2)
    return Case(data, tokens, [current, entropy])


def rows_of(outputs, rows):
    """The same outputs for some rows."""
    if is_dataclass(outputs):
        return type(outputs)(*(rows_of(getattr(outputs, field.name), rows) for field in fields(outputs)))
    return outputs if outputs is None else outputs[rows]


@st.composite
def partitions(draw):
    """The samples 0..n-1 in any order, cut anywhere; parts may be empty of valid tokens, not of rows."""
    order = draw(st.permutations(range(ROWS)))
    cuts = sorted(draw(st.sets(st.integers(1, ROWS - 1))))
    return [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, ROWS], strict=True)]


def gradients(loss, leaves):
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15, deadline=None)
@given(partition=partitions(), seed=st.integers(0, 999))
def test_the_parts_make_the_whole(name, partition, seed, make_batch):
    loss_fn = LOSSES[name]
    case = case_of(loss_fn, make_batch, seed)
    size = loss_fn.rows_per_sample
    whole = loss_fn.sums(case.outputs, case.data)
    parts = []
    for samples in partition:
        # Of pairs, half as many samples: those that a permutation has too many are left out.
        rows = [size * sample + i for sample in samples if sample < ROWS // size for i in range(size)]
        if rows:
            parts.append(loss_fn.sums(rows_of(case.outputs, rows), case.data.select_indices(rows)))
    assert_the_same(parts, whole, case)


OF_EPISODES = [name for name, loss_fn in LOSSES.items() if loss_fn.rows_per_sample == 1]


def in_several_rows(case, seed):
    """Of each row the parts that an episode may have, as row numbers of the case, and the batch of all parts."""
    generator = torch.Generator().manual_seed(seed)
    whole = BatchedDataDict(case.data, input_ids=torch.zeros(ROWS, 5), input_lengths=torch.full((ROWS,), 5))
    cuts = [
        sorted(set(torch.randint(1, 5, (int(count),), generator=generator).tolist()))
        for count in torch.randint(0, 4, (ROWS,), generator=generator)
    ]
    parts = as_rows(whole, cuts)
    return parts["episode_index"].tolist(), parts


@pytest.mark.parametrize("name", OF_EPISODES)
@settings(max_examples=15, deadline=None)
@given(partition=partitions(), seed=st.integers(0, 999))
def test_the_rows_of_an_episode_make_its_one_row(name, partition, seed, make_batch):
    loss_fn = LOSSES[name]
    case = case_of(loss_fn, make_batch, seed)
    rows_of_parts, in_rows = in_several_rows(case, seed)
    whole = loss_fn.sums(case.outputs, case.data)
    parts = []
    counts = torch.zeros(2, dtype=torch.float64)
    for samples in partition:
        at = [place for place, row in enumerate(rows_of_parts) if row in samples]
        part = in_rows.select_indices(at)
        parts.append(loss_fn.sums(rows_of(case.outputs, [rows_of_parts[place] for place in at]), part))
        counts += torch.stack(valid_counts(part))
    assert torch.equal(counts, torch.stack(valid_counts(case.data)))
    assert_the_same(parts, whole, case)


def assert_the_same(parts, whole, case):
    total = torch.stack([part.loss for part in parts]).sum()
    torch.testing.assert_close(total, whole.loss)
    for found, expected in zip(
        gradients(total, case.leaves), gradients(whole.loss, case.leaves), strict=True
    ):
        torch.testing.assert_close(found, expected)
    combine = {MetricKind.MIN: min, MetricKind.MAX: max}
    for metric, value in whole.metrics.items():
        pieces = [part.metrics[metric].value.item() for part in parts]
        assert combine.get(value.kind, sum)(pieces) == pytest.approx(value.value.item(), abs=1e-12), metric


def poisoned(outputs, off, poison):
    """Outputs [B,C,..] for masks [B,S], in the next-token frame unless they have as many columns."""
    if is_dataclass(outputs):
        return type(outputs)(
            *(poisoned(getattr(outputs, field.name), off, poison) for field in fields(outputs))
        )
    if outputs is None:
        return None
    mask = off[:, -outputs.shape[1] :]
    return outputs.masked_fill(mask.reshape(*mask.shape, *[1] * (outputs.ndim - 2)), poison)


@pytest.mark.each_value
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_masked_positions_never_matter(name, poison, make_batch):
    loss_fn = LOSSES[name]
    case = case_of(loss_fn, make_batch, 3)
    off = case.data["token_mask"] * case.data["sample_mask"][:, None] == 0
    data = BatchedDataDict(case.data)
    for column in loss_fn.columns:
        if column.key in data:
            shown = off.roll(-1, dims=1) if column.of_next_token else off
            data[column.key] = data[column.key].masked_fill(shown, poison)
    clean, found = (
        loss_fn.sums(case.outputs, case.data),
        loss_fn.sums(poisoned(case.outputs, off, poison), data),
    )
    assert torch.equal(found.loss, clean.loss)
    values = [{key: metric.value.item() for key, metric in sums.metrics.items()} for sums in (found, clean)]
    assert values[0] == values[1]
    for got, expected in zip(
        gradients(found.loss, case.leaves), gradients(clean.loss, case.leaves), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_sums_neither_wait_for_the_device_nor_name_one(name, make_batch):
    # A tensor on "meta" has no values: reading one, or indexing by a mask, raises. The loss travels to the ranks.
    loss_fn = pickle.loads(pickle.dumps(LOSSES[name]))
    case = case_of(loss_fn, make_batch, 0)

    def on_meta(outputs):
        if is_dataclass(outputs):
            return type(outputs)(*(on_meta(getattr(outputs, field.name)) for field in fields(outputs)))
        return outputs if outputs is None else outputs.to("meta")

    sums = loss_fn.sums(on_meta(case.outputs), case.data.to("meta"))
    assert sums.loss.requires_grad
    assert {
        (metric.value.device.type, metric.value.ndim, metric.value.requires_grad)
        for metric in sums.metrics.values()
    } == {("meta", 0, False)}


def test_counts_add_up_over_parts_and_are_exact_beyond_fp32():
    ones = BatchedDataDict(token_mask=torch.ones(2, 2).expand(2, 2), sample_mask=torch.tensor([2.0**24, 1.0]))
    seqs, toks = valid_counts(ones)
    assert seqs.item() == toks.item() == 2**24 + 1
