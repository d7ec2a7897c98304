"""A worker reads every log-probability at the one temperature that it is given, whatever it samples at."""

import pytest
import tiny
from tolerances import LOGPROBS, METRICS

from nemo_rl_mcore.losses import DistillationLossFn, NLLLossFn


def readings(sampled_at, fused, **options):
    """What every kind of pass says: policy, reference, teacher, losses of tokens and of a teacher, a trained step."""
    config = tiny.policy_config(
        generation={"max_new_tokens": 4, "temperature": sampled_at},
        megatron={"use_fused_linear_logprobs": fused},
    )
    worker = tiny.worker(config, **options)
    batch = tiny.grpo_batch()
    teacher = worker.get_topk_logits(data=batch, k=5)
    batch.update({f"teacher_{name}": value for name, value in teacher.items()})
    return {
        "policy": worker.get_logprobs(data=batch)["logprobs"].numpy(),
        "reference": worker.get_reference_policy_logprobs(data=batch)["reference_logprobs"].numpy(),
        "teacher": (teacher["topk_logits"] - teacher["logsumexp"].unsqueeze(-1)).numpy(),
        "nll": worker.train(batch, NLLLossFn(), eval_mode=True)["all_mb_metrics"]["loss"],
        "distillation": worker.train(batch, DistillationLossFn({}), eval_mode=True)["all_mb_metrics"]["loss"],
        "trained": worker.train(batch, NLLLossFn())["grad_norm"].tolist(),
    }


@pytest.mark.parametrize("fused", [True, False])
def test_every_pass_is_read_at_the_temperature_given(ranks, fused):
    at_1 = ranks(1).run(readings, 1.0, fused)[0]
    at_half = ranks(1).run(readings, 0.5, fused)[0]
    given = ranks(1).run(readings_at, 0.5, fused, 1.0)[0]
    for name, wanted in at_1.items():
        assert given[name] == pytest.approx(wanted, **METRICS), name
    for name in ("policy", "reference", "teacher"):
        assert abs(at_half[name] - at_1[name]).max() > 100 * LOGPROBS, name
    for name in ("nll", "trained"):
        assert at_half[name] != pytest.approx(at_1[name], rel=1e-2), name
    # A student is at no distance from itself, at whichever temperature both are read.
    assert at_half["distillation"] == pytest.approx(given["distillation"], abs=1e-5)


def readings_at(sampled_at, fused, temperature):
    return readings(sampled_at, fused, temperature=temperature)
