"""What the training pass sums up is what `algorithms.mismatch` and the controller measure of prev_logprobs."""

import math
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from refusals import assert_holds

from nemo_rl_mcore.algorithms.mismatch import measure_mismatch, mismatch_of_training, responses
from nemo_rl_mcore.config.loss import ClippedPGLossConfig
from nemo_rl_mcore.config.vllm import MismatchConfig
from nemo_rl_mcore.controllers.metrics import correction_metrics, correction_of_training
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.turns import Ending
from nemo_rl_mcore.losses import ClippedPGLossFn, TokenOutputs
from nemo_rl_mcore.losses.sampler_check import ON_POLICY, SamplerCheck, SamplerSums
from nemo_rl_mcore.training.sums import combine_metrics, divide, valid_counts

THRESHOLD = 1.15
EXACT = {"rel": 1e-12, "abs": 1e-12}


def rollout(*, episodes=False, seed=0):
    """Sixteen rows of ten tokens: some are masked, dropped, of several rows, or drawn by other weights."""
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
        drawn_on_policy=torch.tensor([1.0] * 10 + [0.0] * 6),
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
    """The sums of a step whose passes compute `prev_logprobs` again, in so many microbatches of whole episodes."""
    loss = ClippedPGLossFn(loss_config(**config), sampler_check=SamplerCheck(THRESHOLD))
    samples = [batch.slice(rows.start, rows.stop) for rows in batch.samples()]
    size = -(-len(samples) // parts)
    chunks = [BatchedDataDict.from_batches(samples[at : at + size]) for at in range(0, len(samples), size)]
    metrics = []
    for chunk in chunks:
        given = BatchedDataDict({key: value for key, value in chunk.items() if key != "prev_logprobs"})
        metrics.append(loss.sums(TokenOutputs(chunk["prev_logprobs"][:, 1:]), given).metrics)
    totals = combine_metrics(metrics)
    divided = divide(totals, *valid_counts(batch))
    kinds = {name: metric.kind for name, metric in totals.items()}
    return {"all_mb_metrics": {name: [value] for name, value in divided.items()}, "metric_kinds": kinds}


@pytest.mark.parametrize("parts", [1, 3, 16])
@pytest.mark.parametrize("episodes", [False, True])
def test_the_sums_of_training_say_what_the_pass_before_it_would(episodes, parts):
    batch = rollout(episodes=episodes)
    sums = SamplerSums.taken_from(in_training(batch, parts))
    young = batch.select_indices([row for row in range(16) if batch[ON_POLICY][row]])
    wanted = measure_mismatch(young).metrics(THRESHOLD)
    assert 0 < wanted["mismatch/seqs_above_threshold"] < 1
    found = mismatch_of_training(1, sums, responses(young), MismatchConfig(threshold=THRESHOLD))
    assert found == pytest.approx(wanted, **EXACT)
    # The driver's differences are of fp32, the loss's of fp64.
    assert correction_of_training(sums) == pytest.approx(correction_metrics(batch), rel=1e-6)


def test_without_a_column_all_rows_are_on_policy():
    batch = rollout()
    del batch[ON_POLICY]
    sums = SamplerSums.taken_from(in_training(batch))
    wanted = measure_mismatch(batch).metrics(THRESHOLD)
    found = mismatch_of_training(1, sums, responses(batch), MismatchConfig(threshold=THRESHOLD))
    assert found == pytest.approx(wanted, **EXACT)


def test_the_sums_are_taken_out_of_the_result():
    result = in_training(rollout())
    before = {*result["metric_kinds"]}
    SamplerSums.taken_from(result)
    assert result["metric_kinds"].keys() == result["all_mb_metrics"].keys()
    assert before - result["metric_kinds"].keys() == {name for name in before if name.startswith("sampler/")}


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
    for check in (None, SamplerCheck()):
        current = batch["prev_logprobs"][:, 1:].clone().requires_grad_()
        sums = ClippedPGLossFn(loss_config(**config), sampler_check=check).sums(
            TokenOutputs(current), batch if check is None else batch.without("prev_logprobs")
        )
        sums.loss.backward()
        gradients.append(current.grad)
        losses.append(sums.loss.detach())
        metrics.append(
            {name: metric.value for name, metric in sums.metrics.items() if "sampler/" not in name}
        )
    assert torch.equal(*losses)
    assert torch.equal(*gradients)
    assert gradients[0].abs().max() > 0
    assert metrics[0] == metrics[1]


def test_a_step_without_a_chunk_agrees():
    sums = SamplerSums.taken_from({"all_mb_metrics": {}, "metric_kinds": {}})
    assert mismatch_of_training(1, sums, 0, MismatchConfig(threshold=2.0)) == {
        "mismatch/token_mult_prob_error": 1.0,
        "mismatch/gen_kl_error": 0.0,
        "mismatch/max_seq_mult_prob_error": 1.0,
        "mismatch/seqs_above_threshold": 0.0,
    }
    assert correction_of_training(sums) == {}


def test_ratios_that_no_number_holds_are_no_error():
    zero = {field.name: 0.0 for field in fields(SamplerSums)}
    assert math.isnan(correction_of_training(SamplerSums(**zero | {"trained_tokens": 4.0}))["async/ess"])
    large = SamplerSums(**zero | {"trained_tokens": 1.0, "ratio": 1e200, "ratio_squares": math.inf})
    assert correction_of_training(large)["async/ess"] == 0.0


def test_a_warning_says_how_many_without_names(capsys):
    sums = SimpleNamespace(tokens=8.0, error=10.0, divergence=0.1, largest=1.5, above=2.0)
    mismatch_of_training(7, sums, 16, MismatchConfig(threshold=1.2))
    said = capsys.readouterr().err
    assert_holds(said, "step 7: ", "2 of 16", "policy.generation.mismatch.threshold: 1.2", "1.5")
    assert said.count("\n") == 1
