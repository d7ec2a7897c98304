"""Rows and samples: what a recipe counts, what the worker's API counts, and what is no whole sample."""

from functools import partial

import pytest
import torch
from fake_backend import FakeBackend, SumOfRewards, rows
from refusals import refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import ClippedPGLossFn, DistillationLossFn, DPOLossFn, MseValueLossFn, NLLLossFn
from nemo_rl_mcore.rank.train_step import BatchSizes, TrainStep
from nemo_rl_mcore.recipe.load import load_config


@pytest.fixture(scope="module")
def policy():
    """64 samples in a step, 32 in a microbatch."""
    return load_config("examples/configs/dpo_cpu.yaml").policy


@pytest.mark.parametrize(
    ("loss_fn", "given", "wanted"),
    [
        (NLLLossFn(), (None, None), (64, 32)),
        (DPOLossFn({}), (None, None), (128, 64)),
        (DPOLossFn({}), (8, None), (8, 64)),
        (DPOLossFn({}), (None, 2), (128, 2)),
        (NLLLossFn(), (7, 3), (7, 3)),
    ],
)
def test_the_config_counts_samples_and_the_api_rows(policy, loss_fn, given, wanted):
    sizes = BatchSizes.of(policy, loss_fn, *given)
    assert (sizes.gbs, sizes.mbs) == wanted


@pytest.mark.parametrize("loss", [NLLLossFn, partial(DPOLossFn, {}), partial(ClippedPGLossFn, {})])
def test_a_loss_that_expects_the_fused_head_needs_a_model_with_one(policy, loss):
    BatchSizes.of(policy, loss(use_fused_linear_logprobs=True), None, None)
    megatron = policy.megatron_cfg.model_copy(update={"use_fused_linear_logprobs": False})
    unfused = policy.model_copy(update={"megatron_cfg": megatron})
    BatchSizes.of(unfused, loss(), None, None)
    with refused("fused-loss", "policy.megatron_cfg.use_fused_linear_logprobs: true"):
        BatchSizes.of(unfused, loss(use_fused_linear_logprobs=True), None, None)


def test_losses_that_have_one_head_only_take_either_argument(policy):
    megatron = policy.megatron_cfg.model_copy(update={"use_fused_linear_logprobs": False})
    unfused = policy.model_copy(update={"megatron_cfg": megatron})
    for loss in (MseValueLossFn, DistillationLossFn):
        BatchSizes.of(unfused, loss({}, use_fused_linear_logprobs=True), None, None)


@pytest.mark.parametrize(
    ("given", "name"), [((3, 2), "gbs 3"), ((4, 1), "mbs 1"), ((0, 2), "gbs 0"), ((4, -2), "mbs -2")]
)
def test_sizes_that_part_a_pair_are_refused(policy, given, name):
    with refused("rows-per-sample", name, 2, "DPOLossFn"):
        BatchSizes.of(policy, DPOLossFn({}), *given)


def test_a_shard_holds_whole_pairs(policy):
    sizes = BatchSizes.of(policy, DPOLossFn({}), 12, 2)
    assert sizes.of_shard(3) == 4
    with refused("data-parallel-split", "gbs 12", 4, 2):
        sizes.of_shard(4)


def test_steps_take_every_row(policy):
    data, sizes = BatchedDataDict(row=torch.arange(6)), BatchSizes.of(policy, NLLLossFn(), 6, 1)
    assert [step["row"].tolist() for step in sizes.steps(data, 2)] == [[0, 1, 2], [3, 4, 5]]
    for size in (0, 5):
        with refused("rows-per-step", size, 3, "gbs 6", 2):
            sizes.steps(data.slice(0, size), 2)


def open_step(rows_per_sample):
    backend = FakeBackend()
    step = TrainStep(backend)
    step.begin(SumOfRewards(rows_per_sample=rows_per_sample), gbs=8, mbs=2)
    return step, backend


@pytest.mark.parametrize(("rows_per_sample", "samples"), [(1, 8), (2, 4), (4, 2)])
def test_the_schedule_advances_by_samples(rows_per_sample, samples):
    step, backend = open_step(rows_per_sample)
    step.microbatch(rows([1.0] * 8))
    step.finish()
    assert backend.samples == samples
