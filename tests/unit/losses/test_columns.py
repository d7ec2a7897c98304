"""The columns that a loss declares are those that it reads: it works with them alone, and not without any."""

import pytest
import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import (
    ClippedPGLossFn,
    DistillationLossFn,
    DPOLossFn,
    LossInputType,
    LossSums,
    LossType,
    MseValueLossFn,
    NLLLossFn,
    TokenLossFunction,
    TokenOutputs,
    ValueOutputs,
)

MASKS = ("token_mask", "sample_mask")
PG = ["prev_logprobs", "generation_logprobs", "advantages"]
REFERENCE = "reference_policy_logprobs"
NO_KL = {"reference_policy_kl_penalty": 0.0}
TEACHER = ["teacher_topk_indices", "teacher_topk_logits", "teacher_logsumexp", "teacher_tail_logmass"]


def of_tokens(logprobs):
    return TokenOutputs(logprobs)


def of_values(logprobs):
    return ValueOutputs(torch.nn.functional.pad(logprobs, (1, 0)))


CASES = [
    (ClippedPGLossFn(NO_KL), PG, of_tokens),
    (ClippedPGLossFn({}), [*PG, REFERENCE], of_tokens),
    (ClippedPGLossFn({"use_kl_in_reward": True}), PG, of_tokens),
    (ClippedPGLossFn(NO_KL | {"force_on_policy_ratio": True}), PG[1:], of_tokens),
    (ClippedPGLossFn(NO_KL | {"use_importance_sampling_correction": True}), PG, of_tokens),
    (ClippedPGLossFn(NO_KL | {"disable_ppo_ratio": True}), PG, of_tokens),
    (NLLLossFn(), [], of_tokens),
    (DPOLossFn({}), [REFERENCE], of_tokens),
    (MseValueLossFn({}), ["returns"], of_values),
    (MseValueLossFn({"cliprange": 0.2}), ["returns", "values"], of_values),
]


@pytest.mark.parametrize(("loss", "keys", "outputs"), CASES)
def test_a_loss_declares_what_it_reads(make_batch, loss, keys, outputs):
    logprobs, data = make_batch(rows=4)
    data["returns"], data["values"] = data["advantages"], data["advantages"]
    assert [column.key for column in loss.columns] == keys
    declared = BatchedDataDict({key: data[key] for key in (*MASKS, *keys)})
    assert loss.sums(outputs(logprobs), declared).loss.isfinite()
    for key in keys:
        lacking = BatchedDataDict({other: declared[other] for other in declared if other != key})
        with pytest.raises(ValueError, match=f"no '{key}'"):
            loss.sums(outputs(logprobs), lacking)


@pytest.mark.parametrize(("rl_weight", "more"), [(0.0, []), (0.5, [*PG, REFERENCE])])
def test_distillation_reads_the_teacher_and_its_policy_gradient(rl_weight, more):
    assert [column.key for column in DistillationLossFn({"rl_weight": rl_weight}).columns] == TEACHER + more


def test_only_dpo_and_the_teacher_speak_of_the_next_token():
    assert all(column.of_next_token for column in DPOLossFn({}).columns)
    distillation = DistillationLossFn({"rl_weight": 0.5})
    rolled = [column.key for column in distillation.columns if column.of_next_token]
    assert rolled == TEACHER


class OwnLoss(TokenLossFunction):
    loss_type = LossType.TOKEN_LEVEL

    def sums(self, outputs, data):
        return LossSums(outputs.logprobs.sum(), {})


class OwnDistillation(OwnLoss):
    input_type = LossInputType.DISTILLATION


def test_of_an_own_loss_nothing_is_demanded_but_what_the_pass_before_it_reads():
    assert OwnLoss().columns == ()
    assert [column.key for column in OwnDistillation().columns] == TEACHER
