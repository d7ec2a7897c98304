"""An episode in several rows trains as its one row does: losses, metrics, gradients, weights, under every batching."""

import pytest
import tiny
import torch
from parted_rows import as_rows
from test_microbatching import REFERENCE, assert_metrics, by_tokens, config, uneven_batch
from tolerances import LOGPROBS, REORDERED

from nemo_rl_mcore.losses import DistillationLossFn, MseValueLossFn, NLLLossFn

# Ranks, keys of Megatron, keys of the model.
LAYOUTS = {
    "one-rank": (1, {}, {}),
    "dp2": (2, {}, {}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}, {}),
    "cp2": (2, {"context_parallel_size": 2, "fused_linear_logprobs_context_parallel": True}, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}, {"num_moe_experts": 4, "moe_ffn_hidden_size": 24}),
}


# The longest row has 12 tokens, the longest episode three rows and 24.
WAYS = {
    "rows-1": {"train_micro_batch_size": 1},
    "rows-4": {"train_micro_batch_size": 4},
    "dynamic-below-an-episode": by_tokens("dynamic_batching", 13),
    "dynamic-40": by_tokens("dynamic_batching", 40),
    "packing-below-an-episode": by_tokens("sequence_packing", 16),
    "packing-40": by_tokens("sequence_packing", 40),
}
FUSED = {"use_fused_linear_logprobs": True, "fused_linear_logprobs_packed": True}
WAYS["fused-packing-40"] = WAYS["packing-40"] | {"megatron": FUSED}
LENGTHS = [12, 5, 2, 12, 1, 4, 8, 3]
CUTS = [[4, 8], [], [1], [5], [], [2, 3], [6], []]


def episodes(seed, in_rows):
    """Eight episodes, one without a token to train on and one that does not count; in one row each, or in 15."""
    batch = uneven_batch(seed)
    batch["returns"], values = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(seed))
    batch["values"] = 0.1 * values
    return as_rows(batch, CUTS) if in_rows else batch


def losses():
    """Over tokens, over sequences with ratios of tokens and of sequences, supervised, and against a teacher."""
    of_sequences = {"token_level_loss": False, "sequence_level_importance_ratios": True}
    bounds = {"truncated_importance_sampling_ratio_min": 0.99, "truncated_importance_sampling_ratio": 1.01}
    masked = {
        "token_level_loss": False, "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "seq-mask-tis", **bounds,
    }  # fmt: skip
    truncated = of_sequences | masked | {"truncated_importance_sampling_type": "tis"}
    return (
        *(tiny.grpo_loss(), tiny.grpo_loss(**masked), tiny.grpo_loss(**truncated), NLLLossFn()),
        DistillationLossFn({"kl_type": "reverse", "rl_weight": 0.5, "rl": {"entropy_coef": 0.01}}),
    )


def of_step(worker, step):
    metrics = step["all_mb_metrics"] | {"norm": step["grad_norm"].tolist()}
    return metrics, {name: value.numpy() for name, value in tiny.gradients(worker).items()}


def steps(way, megatron, model, in_rows):
    """One step for each loss, one in two chunks, and one of a critic: metrics and gradients; then weights, schedule."""
    policy = config(way, megatron, model)
    worker, found = tiny.worker(policy), []
    said = worker.get_logprobs(data=episodes(0, in_rows))["logprobs"]
    for seed, loss_fn in enumerate(losses()):
        found.append(of_step(worker, worker.train(tiny.dealt(policy, episodes(seed, in_rows)), loss_fn)))
    evaluated = worker.train(tiny.dealt(policy, episodes(9, in_rows)), losses()[2], eval_mode=True)
    worker.begin_train_step(losses()[2])
    whole = episodes(7, in_rows)
    samples = whole.samples()
    for first, last in ((0, 2), (3, 7)):
        chunk = whole.slice(samples[first].start, samples[last].stop)
        worker.train_microbatch(tiny.dealt(policy, chunk))
    found.append(of_step(worker, worker.finish_train_step()))
    weights, advanced = tiny.parameters(worker), worker.backend.scheduler.num_steps
    critic = tiny.worker(policy, role="value")
    step = critic.train(tiny.dealt(policy, episodes(3, in_rows)), MseValueLossFn({"cliprange": 0.2}))
    found.append((step["all_mb_metrics"], {}))
    weights |= {f"critic.{name}": value for name, value in tiny.parameters(critic).items()}
    weights = {name: value.numpy() for name, value in weights.items()}
    return found, evaluated["all_mb_metrics"], weights, advanced, said.numpy()


@pytest.fixture(scope="module")
def reference(ranks):
    """`reference(layout)`: what each rank computes of the episodes in one row each."""
    known = {}

    def of(layout):
        if layout not in known:
            world_size, *keys = LAYOUTS[layout]
            known[layout] = ranks(world_size).run(steps, REFERENCE, *keys, False)
        return known[layout]

    return of


@pytest.mark.exhaustive_cases("one-rank-dynamic-below-an-episode", "dp2-packing-40", "tp2-sp-dynamic-40")
@pytest.mark.parametrize(
    ("layout", "way"),
    [("one-rank", way) for way in WAYS]
    + [
        (layout, way)
        for layout in ("dp2", "tp2-sp", "pp2", "cp2", "ep2")
        for way in ("rows-1", "dynamic-40", "packing-40", "fused-packing-40")
    ],
)
def test_an_episode_in_rows_trains_as_its_one_row(ranks, reference, layout, way):
    world_size, *keys = LAYOUTS[layout]
    results = ranks(world_size).run(steps, WAYS[way], *keys, True)
    for found, wanted in zip(results, reference(layout), strict=True):
        for (metrics, gradients), (wanted_metrics, wanted_gradients) in zip(found[0], wanted[0], strict=True):
            assert_metrics(metrics, wanted_metrics)
            for name, gradient in wanted_gradients.items():
                assert gradients[name] == pytest.approx(gradient, rel=1e-4, abs=REORDERED), name
        assert_metrics(found[1], wanted[1])
        for name, weight in wanted[2].items():
            assert found[2][name] == pytest.approx(weight, abs=REORDERED), name
        assert found[3] == wanted[3] == 48  # six steps of eight episodes
        last_rows = [0, 0, 0, 1, 2, 2, 3, 3, 4, 5, 5, 5, 6, 6, 7]
        for row, (said, number) in enumerate(zip(found[4], last_rows, strict=True)):
            length = ([*CUTS[number], LENGTHS[number]])[last_rows[:row].count(number)]
            assert said[:length] == pytest.approx(wanted[4][number][:length], abs=LOGPROBS)
