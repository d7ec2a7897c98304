"""The columns that a loss declares are those that it reads; and losses of the user's own."""

import pytest
import torch
from custom_parts import FromScratch, ScaledNLL
from refusals import refused

from nemo_rl_mcore.config import ClippedPGLossConfig, MseValueLossConfig, NLLLossConfig
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
    check_losses,
    make_loss,
)
from nemo_rl_mcore.recipe.load import load_config

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


# A loss of the user's own


def test_a_class_of_ones_own_gets_the_section_the_flag_and_its_arguments():
    cfg = NLLLossConfig(type="custom_parts:ScaledNLL", args={"scale": 3.0})
    loss = make_loss(cfg, True)
    assert isinstance(loss, ScaledNLL)
    assert loss.cfg is cfg
    assert loss.use_fused_linear_logprobs
    batch = BatchedDataDict(token_mask=torch.ones(1, 3), sample_mask=torch.ones(1))
    value, _ = loss(torch.tensor([[-1.0, -2.0]]), batch, 1, 2)
    assert float(value) == pytest.approx(4.5)
    assert isinstance(make_loss(ClippedPGLossConfig(type="custom_parts:FromScratch")), FromScratch)


@pytest.mark.parametrize(
    ("name", "code", "of"),
    [
        ("Stranger", "no-loss", ["loss_fn.type: ", "nemo_rl_mcore.losses"]),
        ("OfValues", "loss-inputs", ["loss_fn.type: ", "VALUE", "LOGPROB"]),
        ("OfNoType", "no-loss", ["loss_fn.type: ", "loss_type"]),
        ("Unfinished", "missing-member", ["loss_fn.type: ", "sums"]),
        ("ScaledNLL", "custom-arguments", ["loss_fn.args: ", "'scale'"]),
    ],
)
def test_what_is_no_such_loss_names_its_key(name, code, of):
    with refused(code, f"custom_parts:{name}", *of):
        make_loss(ClippedPGLossConfig(type=f"custom_parts:{name}"))


def test_the_key_is_that_of_the_section():
    assert make_loss(MseValueLossConfig(type="custom_parts:OfValues"), section="value_loss_fn")
    with refused("loss-inputs", "value_loss_fn.type: ", "LOGPROB"):
        make_loss(MseValueLossConfig(type="custom_parts:FromScratch"), section="value_loss_fn")


@pytest.mark.parametrize(
    ("recipe", "sizes", "code", "of"),
    [
        (
            "grpo_copy_cpu",
            ["policy.train_global_batch_size=128", "policy.train_micro_batch_size=64"],
            None,
            [],
        ),
        ("grpo_copy_cpu", ["policy.train_global_batch_size=256"], "rows-per-step", [256]),
        ("sft_cpu", [], "rows-per-step", ["policy.train_global_batch_size"]),
        ("ppo_cpu", [], "rows-per-sample", ["ppo.ppo_epochs"]),
    ],
)
def test_a_loss_of_pairs_needs_steps_that_hold_them(recipe, sizes, code, of):
    config = load_config(f"examples/configs/{recipe}.yaml", ["+loss_fn.type=custom_parts:OfPairs", *sizes])
    if code is None:
        check_losses(config)
        return
    with refused(code, "loss_fn.type: custom_parts:OfPairs", 2, *of):
        check_losses(config)
