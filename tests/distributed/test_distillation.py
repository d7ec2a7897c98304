"""Distillation on real models: what a teacher says, and a student that every layout trains alike."""

import numpy as np
import pytest
import tolerances

LAYOUTS = {
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}
SETTINGS = {"kl_type": "jsd", "jsd_beta": 0.3, "rl_weight": 0.5, "rl": {"entropy_coef": 0.01}}
TOP_K, VOCABULARY = 5, 32


def teacher(megatron, weights, k):
    """What a model with other weights says of the batch, and those weights."""
    import tiny

    worker = tiny.worker(tiny.policy_config(megatron=megatron), seed=7)
    if weights is not None:
        tiny.load_full_weights(worker, weights)
    said = worker.get_topk_logits(data=tiny.grpo_batch(), k=k)
    own = {name: parameter.numpy() for name, parameter in tiny.parameters(worker).items()}
    return {name: value.numpy() for name, value in said.items()}, own


def student(megatron, weights, taught, settings, model=None):
    """Two steps after the teacher: the metrics, and the full or sharded weights at the start and the end."""
    import tiny
    import torch

    from nemo_rl_mcore.losses import DistillationLossFn

    worker = tiny.worker(tiny.policy_config(megatron=megatron, model=model))
    if weights is not None:
        tiny.load_full_weights(worker, weights)
    own = {name: parameter.numpy() for name, parameter in tiny.parameters(worker).items()}
    batch = tiny.grpo_batch()
    for name, value in taught.items():
        batch[name if name.startswith("teacher") else f"teacher_{name}"] = torch.from_numpy(value)
    every = worker.get_topk_logits(data=tiny.grpo_batch(), k=tiny.VOCABULARY)
    steps = [worker.train(tiny.shard(batch), DistillationLossFn(settings)) for _ in range(2)]
    metrics = [{**step["all_mb_metrics"], "norm": step["grad_norm"].tolist()} for step in steps]
    logprobs = worker.get_logprobs(data=tiny.grpo_batch())["logprobs"].numpy()
    mask = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:].numpy()
    return metrics, own, {name: value.numpy() for name, value in every.items()}, logprobs, mask


@pytest.fixture(scope="module")
def taught(ranks):
    """A teacher's top-k, and its weights."""
    return ranks(1).run(teacher, {}, None, TOP_K)[0]


@pytest.fixture(scope="module")
def single_rank(ranks, taught):
    return ranks(1).run(student, {}, None, taught[0], SETTINGS)[0]


def full_logprobs(said):
    """[B, S, V] in the order of the vocabulary, from all tokens in the order of their probability."""
    logprobs = said["topk_logits"].astype(np.float64) - said["logsumexp"].astype(np.float64)[..., None]
    return np.take_along_axis(logprobs, np.argsort(said["topk_indices"], axis=-1), axis=-1)


def test_the_teacher_says_the_same_under_every_layout(ranks, taught):
    said, weights = taught
    for megatron in LAYOUTS.values():
        for other, _ in ranks(2).run(teacher, megatron, weights, TOP_K):
            assert (other["topk_indices"] == said["topk_indices"]).all()
            for name in ("topk_logits", "logsumexp", "tail_logmass"):
                assert other[name] == pytest.approx(said[name], abs=tolerances.LOGPROBS), name


def test_top_k_logsumexp_and_tail_belong_to_one_softmax(taught):
    said, _ = taught
    mass = np.exp(said["topk_logits"] - said["logsumexp"][..., None]).sum(-1) + np.exp(said["tail_logmass"])
    real = said["topk_indices"].any(-1)
    assert real.sum() > 50
    assert mass[real] == pytest.approx(1.0, abs=1e-6)
    assert (np.diff(said["topk_logits"], axis=-1) <= 0).all()


def test_the_loss_is_the_divergence_of_the_full_distributions(ranks, taught):
    """Against float64 numpy, with a teacher that names the whole vocabulary."""
    whole, _ = ranks(1).run(teacher, {}, None, VOCABULARY)[0]
    metrics, _, before, _, mask = ranks(1).run(student, {}, None, whole, {"kl_type": "forward"})[0]
    t, s = full_logprobs(whole)[:, :-1], full_logprobs(before)[:, :-1]
    expected = ((np.exp(t) * (t - s)).sum(-1) * mask).sum() / mask.sum()
    assert expected > 0.01
    assert metrics[0]["loss"][0] == pytest.approx(expected, rel=1e-5)
    without_tail = {name: value for name, value in whole.items() if name != "tail_logmass"}
    assert ranks(1).run(student, {}, None, without_tail, {"kl_type": "forward"})[0][0] == metrics


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_the_student_as_one_does(ranks, taught, single_rank, layout):
    metrics, weights, _, logprobs, _ = single_rank
    first = metrics[0]["kl"][0]
    for own_metrics, _, _, own_logprobs, _ in ranks(2).run(
        student, LAYOUTS[layout], weights, taught[0], SETTINGS
    ):
        assert own_metrics[0]["kl"][0] == pytest.approx(first, abs=1e-6)
        for own, reference in zip(own_metrics, metrics, strict=True):
            assert own.keys() == reference.keys()
            for name in reference:
                assert own[name] == pytest.approx(reference[name], rel=2e-4, abs=2e-5), name
        assert own_logprobs == pytest.approx(logprobs, abs=2e-4)
    assert abs(metrics[1]["kl"][0] - metrics[0]["kl"][0]) > 1e-3
    assert metrics[0]["entropy"][0] > 0


def test_tied_embeddings_learn_from_the_ids_too(ranks, taught):
    """The gradient of a tied student goes to the embedding: the divergence falls as in the untied one."""
    metrics, *_ = ranks(1).run(
        student, {}, None, taught[0], {"kl_type": "reverse"}, {"tie_word_embeddings": True}
    )[0]
    assert metrics[1]["kl"][0] < metrics[0]["kl"][0]
