"""The table of the training pass is that of prev_logprobs, however its rows are dealt to microbatches."""

import math

import pytest
import torch

from nemo_rl_mcore.config.loss import ClippedPGLossConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.mismatch import (
    Mismatch,
    correction_metrics,
    table_of_batch,
    table_of_training,
    with_row_numbers,
)
from nemo_rl_mcore.environment.turns import Ending
from nemo_rl_mcore.losses import ClippedPGLossFn, TokenOutputs
from nemo_rl_mcore.losses.kl import COLUMNS, sampler_table
from nemo_rl_mcore.rank.sums import LocalSums

THRESHOLD = 1.15


def rollout(*, episodes=False, seed=0):
    """Sixteen rows of ten tokens: some are masked, dropped or of several rows."""
    draw = torch.Generator().manual_seed(seed)
    shape = (16, 10)
    generation = -torch.rand(shape, generator=draw)
    batch = BatchedDataDict(
        generation_logprobs=generation,
        reference_policy_logprobs=generation - 0.1,
        prev_logprobs=generation + 0.4 * torch.rand(shape, generator=draw).square(),
        advantages=torch.randn(shape, generator=draw),
        token_mask=(torch.rand(shape, generator=draw) < 0.7).float(),
        sample_mask=torch.ones(16),
        ending=torch.zeros(16, dtype=torch.long),
        prompt_index=torch.arange(16),
        sample_index=torch.zeros(16, dtype=torch.long),
    )
    batch["token_mask"][:, 0] = 0
    batch["token_mask"][5] = 0
    batch["ending"][4] = int(Ending.DROPPED)
    batch["sample_mask"][4] = 0
    batch["sample_mask"][7] = 0  # filtered, not dropped
    if episodes:
        batch["episode_index"] = torch.tensor([0, 0, 0, 1, 2, 3, 4, 5, 6, 6, 7, 7, 8, 9, 10, 11])
    return batch


def loss_config(**config):
    return ClippedPGLossConfig(**{"reference_policy_kl_penalty": 0.0} | config)


def in_training(batch, parts=1, **config):
    """The result of a step whose passes compute `prev_logprobs` again, in so many microbatches of whole episodes.

    They come in another order, and each is filled up with a row of zeros.
    """
    loss = ClippedPGLossFn(loss_config(**config), own_previous=True)
    numbered = with_row_numbers(batch)
    samples = [numbered.slice(rows.start, rows.stop) for rows in batch.samples()]
    size = -(-len(samples) // parts)
    total = LocalSums()
    for at in reversed(range(0, len(samples), size)):
        rows = BatchedDataDict.from_batches(samples[at : at + size])
        filled = {key: torch.cat([value, torch.zeros_like(value[:1])]) for key, value in rows.items()}
        given = BatchedDataDict({key: value for key, value in filled.items() if key != "prev_logprobs"})
        total.add(LocalSums.of(loss.sums(TokenOutputs(filled["prev_logprobs"][:, 1:]), given), given))
    return {"row_table": total.reduce(lambda numbers: numbers[None]).row_table}


@pytest.mark.parametrize("parts", [1, 3, 16])
@pytest.mark.parametrize("episodes", [False, True])
def test_the_table_of_training_is_that_of_the_pass_before_it(episodes, parts):
    batch = rollout(episodes=episodes)
    before, found = table_of_batch(batch), table_of_training(in_training(batch, parts), batch.size)
    assert torch.equal(found, before)
    assert before[:, 0].count_nonzero() == 13
    metrics = Mismatch.of(batch, found).metrics(THRESHOLD)
    assert 0 < metrics["mismatch/seqs_above_threshold"] < 1


def test_the_table_worked_out_by_hand():
    training = torch.tensor([[math.log(0.5), 7.0, 0.0], [9.0, 9.0, math.inf]])
    generation = torch.tensor([[0.0, math.nan, math.log(0.25)], [1.0, 2.0, 3.0]])
    counted = torch.tensor([[True, False, True], [False] * 3])
    found = sampler_table(generation, training, counted, "k1")
    # Ratios one half and four.
    behaviour_kl = (0.5 - 1 + math.log(2)) + (4 - 1 - math.log(4))
    wanted = [2, 2 + 4, math.log(0.5) + math.log(4), 4.5, 16.25, behaviour_kl, 4]
    assert [abs(value) for value in found[0].tolist()] == pytest.approx(wanted)
    assert found[1].tolist() == [0] * len(COLUMNS)
    assert sampler_table(*[torch.zeros(2, 0)] * 2, torch.zeros(2, 0, dtype=torch.bool), "k3").shape == (2, 7)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis"}
        | {"truncated_importance_sampling_ratio": 1.1},
        {"sequence_level_importance_ratios": True, "token_level_loss": False},
        {"use_cispo": True},
        {"ratio_clip_c": 3.0},
        {"disable_ppo_ratio": True},
        {"reference_policy_kl_penalty": 0.1},
    ],
    ids=str,
)
def test_the_loss_is_that_of_log_probabilities_that_were_computed_before(config):
    batch = rollout()
    gradients, losses, metrics = [], [], []
    for own in (False, True):
        current = batch["prev_logprobs"][:, 1:].clone().requires_grad_()
        given = with_row_numbers(batch.without("prev_logprobs")) if own else batch
        sums = ClippedPGLossFn(loss_config(**config), own_previous=own).sums(TokenOutputs(current), given)
        sums.loss.backward()
        gradients.append(current.grad)
        losses.append(sums.loss.detach())
        metrics.append({name: metric.value for name, metric in sums.metrics.items()})
    assert torch.equal(*losses)
    assert torch.equal(*gradients)
    assert gradients[0].abs().max() > 0
    assert metrics[0] == metrics[1]


def test_ratios_that_no_number_holds_are_no_error():
    table = torch.zeros(2, len(COLUMNS), dtype=torch.float64)
    table[:, COLUMNS.index("tokens")] = 2.0
    assert math.isnan(correction_metrics(table)["async/ess"])
    table[0, COLUMNS.index("ratio")], table[0, COLUMNS.index("ratio_squares")] = 1e200, math.inf
    assert correction_metrics(table)["async/ess"] == 0.0
