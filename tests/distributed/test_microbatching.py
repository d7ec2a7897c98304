"""However rows are put into microbatches, a step is the same: loss, metrics, gradients, weights, log-probabilities."""

from unittest.mock import patch

import numpy as np
import pytest
import tiny
import torch
from refusals import refused
from tolerances import LOGPROBS, METRICS, REORDERED

from nemo_rl_mcore.losses import DistillationLossFn, NLLLossFn
from nemo_rl_mcore.rank import accelerator

LAYOUTS = {
    "one-rank": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
}


def by_tokens(section, budget, length_round=4):
    budgets = {"train_mb_tokens": budget, "logprob_mb_tokens": budget}
    return {section: {"enabled": True, "sequence_length_round": length_round} | budgets}


def fused(way, **keys):
    """The same rows with fused log-probabilities: `megatron` has Megatron's keys of a way."""
    chunks = {"use_fused_linear_logprobs": True, "fused_linear_logprobs_chunk_size": 5}
    return way | {"megatron": chunks | {"fused_linear_logprobs_packed": "sequence_packing" in way} | keys}


# The longest row has 12 tokens, all rows 47.
WAYS = {
    "rows-1": {"train_micro_batch_size": 1},
    "rows-8": {"train_micro_batch_size": 8},
    "dynamic-17": by_tokens("dynamic_batching", 17),
    "dynamic-40": by_tokens("dynamic_batching", 40, length_round=1),
    "packing-16": by_tokens("sequence_packing", 16),
    "packing-29": by_tokens("sequence_packing", 29),
    "packing-64": by_tokens("sequence_packing", 64, length_round=64),
}
WAYS |= {
    "fused-rows-8": fused(WAYS["rows-8"]),
    "fused-packing-16": fused(WAYS["packing-16"]),
    "fused-packing-29": fused(WAYS["packing-29"]),
    # Room for the logits of every row of a microbatch.
    "fused-packing-64-cache": fused(WAYS["packing-64"], fused_linear_logprobs_cache_bytes=64 * 32 * 4),
}
FEWER_WAYS = (
    "dynamic-17",
    "packing-16",
    "packing-29",
    "fused-rows-8",
    "fused-packing-16",
    "fused-packing-29",
)
REFERENCE = {"train_micro_batch_size": 2}
LENGTH = {"max_total_sequence_length": 12}
# A large epsilon: else Adam would blow the rounding of tiny gradients up to whole steps. And every rank keeps all
# reduced gradients, not only those of its own part.
OPTIMIZER = {
    "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "adam_eps": 1e-3, "use_distributed_optimizer": False}
}


def uneven_batch(seed=0):
    """Eight rows of 1 to 12 tokens; one has no token to train on, one is left out."""
    batch = tiny.grpo_batch(seed=seed)
    lengths = torch.tensor([12, 5, 2, 12, 1, 4, 8, 3])
    real = torch.arange(12) < lengths.unsqueeze(1)
    batch["input_lengths"] = lengths
    batch["input_ids"] = batch["input_ids"].clamp(min=1) * real
    batch["token_mask"] = (real & (torch.arange(12) >= 1)).float()
    batch["token_mask"][1] = 0.0
    return taught(batch, seed)


def taught(batch, seed, k=5):
    """The batch with what a teacher of random logits says of each next token."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*batch["input_ids"].shape, tiny.VOCABULARY, generator=generator)
    best = logits.topk(k)
    batch["teacher_topk_logits"], batch["teacher_topk_indices"] = best
    batch["teacher_logsumexp"] = logits.logsumexp(-1)
    rest = logits.scatter(-1, best.indices, -torch.inf)
    batch["teacher_tail_logmass"] = rest.logsumexp(-1) - batch["teacher_logsumexp"]
    return batch


def losses():
    """Over tokens, over sequences, supervised, and against a teacher with and without the tokens themselves."""
    gspo = {"token_level_loss": False, "sequence_level_importance_ratios": True}
    with_rewards = {"kl_type": "jsd", "jsd_beta": 0.3, "rl_weight": 0.5, "rl": {"entropy_coef": 0.01}}
    return (
        *(tiny.grpo_loss(), tiny.grpo_loss(**gspo), NLLLossFn()),
        *(DistillationLossFn({"kl_type": "reverse"}), DistillationLossFn(with_rewards)),
    )


def config(way, megatron, model=None):
    """The policy of a way on a layout."""
    sections = LENGTH | way
    keys = OPTIMIZER | megatron | sections.pop("megatron", {})
    return tiny.policy_config(model=model, megatron=keys, **sections)


def three_steps(way, megatron, model=None):
    """What a batch is given, and one step for each loss: metrics and gradients of each, the weights after the last."""
    worker = tiny.worker(config(way, megatron, model))
    start = tiny.parameters(worker)
    said = worker.get_logprobs(data=uneven_batch()) | worker.get_topk_logits(data=uneven_batch(), k=3)
    said |= worker.get_reference_policy_logprobs(data=uneven_batch())
    found = []
    for seed, loss_fn in enumerate(losses()):
        step = worker.train(tiny.shard(uneven_batch(seed)), loss_fn)
        metrics = step["all_mb_metrics"] | {"norm": step["grad_norm"].tolist()}
        found.append((metrics, as_arrays(tiny.gradients(worker))))
    end = tiny.parameters(worker)
    assert tiny.largest_difference(start, end) > 1e-2
    evaluated = worker.train(tiny.shard(uneven_batch()), losses()[0], eval_mode=True)
    return as_arrays(said), found, as_arrays(end), evaluated["all_mb_metrics"]


def as_arrays(tensors):
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def assert_equal(found, wanted):
    """The results of `three_steps` of one rank, in two ways."""
    said, steps, weights, evaluated = found
    for name, values in wanted[0].items():
        assert said[name] == pytest.approx(values, abs=LOGPROBS), name
        assert ((said[name] == 0) == (values == 0)).all(), name
    for (metrics, gradients), (wanted_metrics, wanted_gradients) in zip(steps, wanted[1], strict=True):
        assert_metrics(metrics, wanted_metrics)
        for name, gradient in wanted_gradients.items():
            assert gradients[name] == pytest.approx(gradient, rel=1e-4, abs=REORDERED), name
    for name, weight in wanted[2].items():
        assert weights[name] == pytest.approx(weight, abs=REORDERED), name
    assert_metrics(evaluated, wanted[3])


def assert_metrics(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name] == pytest.approx(wanted[name], **METRICS), name


@pytest.fixture(scope="module")
def reference(ranks):
    """`reference(layout)`: what each rank computes with two rows in a microbatch."""
    known = {}

    def of(layout):
        if layout not in known:
            world_size, megatron = LAYOUTS[layout]
            known[layout] = ranks(world_size).run(three_steps, REFERENCE, megatron)
        return known[layout]

    return of


@pytest.mark.quick_cases(
    *(f"one-rank-{way}" for way in ("rows-1", "dynamic-17", "packing-16")),
    *("one-rank-fused-packing-29", "dp2-rows-8", "tp2-sp-fused-packing-29", "pp2-fused-packing-29"),
)
@pytest.mark.parametrize(
    ("layout", "way"),
    [("one-rank", way) for way in WAYS]
    + [(layout, way) for layout in ("dp2", "tp2", "tp2-sp", "pp2") for way in ("rows-8", *FEWER_WAYS)],
)
def test_a_step_does_not_depend_on_its_microbatches(ranks, reference, layout, way):
    world_size, megatron = LAYOUTS[layout]
    for found, wanted in zip(
        ranks(world_size).run(three_steps, WAYS[way], megatron), reference(layout), strict=True
    ):
        assert_equal(found, wanted)


def shapes(way, megatron):
    """What the model is given of a training batch and of a log-probability batch."""
    worker = tiny.worker(config(way, megatron))
    seen = []
    worker.backend.chunks[0].register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    worker.get_logprobs(data=uneven_batch())
    passes = len(seen)
    worker.train(uneven_batch(), losses()[0])
    return seen[:passes], seen[passes:]


@pytest.mark.parametrize(
    ("way", "wanted"),
    [
        ("dynamic-17", [(1, 12), (1, 12), (2, 8), (4, 4)]),
        ("dynamic-40", [(3, 12), (5, 5)]),
        ("packing-16", [(1, 16), (1, 16), (1, 16)]),
        ("packing-29", [(1, 29), (1, 20)]),
    ],
)
def test_the_model_is_given_what_the_budget_allows(ranks, way, wanted):
    logprobs, training = ranks(1).run(shapes, WAYS[way], {})[0]
    assert training == wanted
    assert logprobs == wanted


EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24}


def step_with_all_rows_on_one_rank(way, megatron, model, weights):
    """A split step of two chunks: the first data-parallel rank has every row, then one row, and the others none."""
    from nemo_rl_mcore.rank.megatron import parallel_groups

    policy = config(way, megatron, model)
    worker = tiny.worker(policy)
    start = as_arrays(tiny.parameters(worker))
    if weights is not None:
        tiny.load_full_weights(worker, weights)
    first = parallel_groups.group("data").rank() == 0
    worker.begin_train_step(losses()[0])
    for rows in (8, 1):
        worker.train_microbatch(uneven_batch().slice(0, rows if first else 0))
    step = worker.finish_train_step()
    logprobs = worker.get_logprobs(data=uneven_batch().slice(0, 8 if first else 1))["logprobs"]
    end = {
        tiny.global_name(name, policy): value for name, value in as_arrays(tiny.parameters(worker)).items()
    }
    return start, step["all_mb_metrics"], end, logprobs.numpy()


@pytest.mark.each_value
@pytest.mark.parametrize("way", ["rows-1", "dynamic-17", "packing-16", "fused-packing-16"])
@pytest.mark.parametrize(
    ("megatron", "model"), [({}, {}), ({"expert_model_parallel_size": 2}, EXPERTS)], ids=["dp2", "ep2"]
)
def test_ranks_with_less_to_do_or_nothing_keep_step(ranks, way, megatron, model):
    weights, wanted_metrics, wanted_end, wanted_logprobs = ranks(1).run(
        step_with_all_rows_on_one_rank, REFERENCE, {}, model, None
    )[0]
    for _, metrics, end, logprobs in ranks(2).run(
        step_with_all_rows_on_one_rank, WAYS[way], megatron, model, weights, timeout_s=30
    ):
        assert_metrics(metrics, wanted_metrics)
        for name, weight in end.items():
            assert weight == pytest.approx(wanted_end[name], abs=REORDERED), name
        assert logprobs == pytest.approx(wanted_logprobs[: len(logprobs)], abs=2e-4)


BALANCED = EXPERTS | {"moe_aux_loss_coeff": 0.5}
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("layout", "way", "model"),
    [
        ("one-rank", by_tokens("dynamic_batching", 96), BALANCED),
        ("tp2-sp", WAYS["fused-packing-64-cache"], BALANCED),
        ("one-rank", WAYS["fused-packing-64-cache"], TIED),
        ("tp2-sp", WAYS["fused-packing-29"], TIED),
        ("pp2", WAYS["fused-packing-29"], TIED),
    ],
    ids=["experts", "experts-fused-tp2-sp", "tied-fused", "tied-fused-tp2-sp", "tied-fused-pp2"],
)
def test_so_is_that_of_balanced_experts_and_of_tied_embeddings(ranks, layout, way, model):
    world_size, megatron = LAYOUTS[layout]
    found, wanted = (
        ranks(world_size).run(three_steps, given, megatron, model) for given in (way, WAYS["rows-8"])
    )
    for own, reference in zip(found, wanted, strict=True):
        assert_equal(own, reference)


INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    "way", [{"train_micro_batch_size": 3}, WAYS["fused-packing-16"]], ids=["rows-3", "fused-packing-16"]
)
def test_the_interleaved_schedule_is_given_full_rounds(ranks, way):
    four_layers = {"num_layers": 4}
    wanted = ranks(2).run(three_steps, {"train_micro_batch_size": 4}, INTERLEAVED, four_layers)
    for found, reference in zip(
        ranks(2).run(three_steps, way, INTERLEAVED, four_layers, timeout_s=30), wanted, strict=True
    ):
        assert_equal(found, reference)


def padded_for_fp8(recipe, way, context):
    """The numbers of tokens of a rank's part of each microbatch, with these settings of Transformer Engine."""
    from dataclasses import replace

    from nemo_rl_mcore.rank.megatron.batching import Batching, column_multiple

    policy = tiny.policy_config(**{**LENGTH, **WAYS[way]})
    # Only its settings: FP8 products themselves need a GPU.
    config = replace(tiny.worker(policy).backend.config, fp8="e4m3", fp8_recipe=recipe)
    slices = 2 * context if context > 1 else 1
    batching = Batching(config, column_multiple(config, slices), slices, policy.token_budgets)
    found = batching.microbatches(tiny.grpo_batch(), policy.train_micro_batch_size, 1)
    return [one.input_ids.numel() // context for one in found]


@pytest.mark.parametrize("way", ["rows-1", "dynamic-17", "packing-29"])
@pytest.mark.parametrize(("recipe", "multiple"), [("blockwise", 128), ("mxfp8", 32), ("tensorwise", 16)])
@pytest.mark.parametrize("context", [1, 2])
def test_fp8_products_get_the_numbers_of_tokens_that_they_need(ranks, recipe, multiple, way, context):
    (found,) = ranks(1).run(padded_for_fp8, recipe, way, context)
    assert found
    assert all(tokens % multiple == 0 for tokens in found)


CP2 = {"context_parallel_size": 2}


def against_data_parallel(way, experts, block=512):
    """The largest difference of a step's log-probabilities, metrics and gradients to ranks with whole sequences."""
    from nemo_rl_mcore.rank.megatron import layer_specs

    model = BALANCED if experts else {}
    sections = REFERENCE if way == "rows-2" else WAYS[way]
    found = []
    for megatron in (CP2, {}):
        worker = tiny.worker(config(sections, megatron, model))
        with patch.object(layer_specs, "_BLOCK", block):
            said = worker.get_logprobs(data=uneven_batch())["logprobs"].numpy()
            step = worker.train(tiny.shard(uneven_batch()), losses()[0])
        names = ("loss", "global_valid_toks", "global_valid_seqs")
        metrics = [*(step["all_mb_metrics"][name] for name in names), step["grad_norm"].tolist()]
        gradients = as_arrays(tiny.gradients(worker))
        found.append([said, np.array(metrics), *(gradients[name] for name in sorted(gradients))])
    return max(float(abs(own - wanted).max()) for own, wanted in zip(*found, strict=True))


def test_a_step_of_ranks_that_share_sequences_is_that_of_ranks_with_whole_ones(ranks):
    for case in (
        *(("rows-8", False), ("packing-29", False), ("rows-2", True)),
        *(("rows-8", False, 2), ("packing-29", False, 2)),
    ):
        assert max(ranks(2).run(against_data_parallel, *case)) < REORDERED


def refused_on_gpus():
    """Layers of ranks that are told that they have a GPU, on a machine without Transformer Engine."""
    from nemo_rl_mcore.rank.megatron.layer_specs import decoder_spec

    alone = tiny.worker(tiny.policy_config())
    transformer, shared = alone.backend.config, tiny.policy_config(megatron=CP2).megatron_cfg
    with patch.object(accelerator, "has_cuda", lambda: True):
        decoder_spec(alone.policy.megatron_cfg, transformer, None)
        with refused("missing-package", "policy.megatron_cfg.context_parallel_size: 2"):
            decoder_spec(shared, transformer, None)
    return decoder_spec(shared, transformer, None) is not None


def test_local_layers_on_gpus_are_refused_when_a_worker_starts(ranks):
    assert ranks(1).run(refused_on_gpus) == [True]
