"""The loss of distillation is the divergence of the whole distributions of real models."""

import numpy as np
import pytest
import tiny

from nemo_rl_mcore.losses import DistillationLossFn


def taught_and_trained():
    """What teacher and student say of all tokens; the metrics of two steps, with the tail told and without."""
    of_teacher = tiny.worker(tiny.policy_config(), seed=7).get_topk_logits(
        data=tiny.grpo_batch(), k=tiny.VOCABULARY
    )
    metrics = []
    for named in (of_teacher, of_teacher.without("tail_logmass")):
        worker, batch = tiny.worker(tiny.policy_config()), tiny.grpo_batch()
        of_student = worker.get_topk_logits(data=batch, k=tiny.VOCABULARY)
        for name, value in named.items():
            batch[name if name.startswith("teacher") else f"teacher_{name}"] = value
        steps = [worker.train(batch, DistillationLossFn({"kl_type": "forward"})) for _ in range(2)]
        metrics.append([step["all_mb_metrics"] | {"norm": step["grad_norm"].tolist()} for step in steps])
    mask = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:].numpy()
    said = [{name: value.numpy() for name, value in one.items()} for one in (of_teacher, of_student)]
    return said, metrics, mask


def full_logprobs(said):
    """[B, S - 1, V] in the order of the vocabulary, from all tokens in the order of their probability."""
    logprobs = said["topk_logits"].astype(np.float64) - said["logsumexp"].astype(np.float64)[..., None]
    return np.take_along_axis(logprobs, np.argsort(said["topk_indices"], axis=-1), axis=-1)[:, :-1]


def test_the_loss_is_the_divergence_of_the_full_distributions(ranks):
    """Against float64 numpy, with a teacher that names the whole vocabulary."""
    ((said, (metrics, without_tail), mask),) = ranks(1).run(taught_and_trained)
    t, s = map(full_logprobs, said)
    expected = ((np.exp(t) * (t - s)).sum(-1) * mask).sum() / mask.sum()
    assert expected > 0.01
    assert metrics[0]["loss"][0] == pytest.approx(expected, rel=1e-5)
    assert without_tail == metrics
