import pytest
import torch
from custom_parts import FromScratch, ScaledNLL
from refusals import refused

from nemo_rl_mcore.config import (
    ClippedPGLossConfig,
    DistillationLossConfig,
    MseValueLossConfig,
    NLLLossConfig,
)
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import (
    ClippedPGLossFn,
    DistillationLossFn,
    MseValueLossFn,
    NLLLossFn,
    check_losses,
    make_loss,
)
from nemo_rl_mcore.recipe.load import load_config


@pytest.mark.parametrize(
    ("cfg", "kind"),
    [
        (ClippedPGLossConfig(ratio_clip_max=0.3), ClippedPGLossFn),
        (NLLLossConfig(), NLLLossFn),
        (DistillationLossConfig(kl_type="reverse"), DistillationLossFn),
        (MseValueLossConfig(scale=2.0), MseValueLossFn),
    ],
)
def test_a_section_without_a_type_is_the_loss_that_it_is_named_for(cfg, kind):
    loss = make_loss(cfg, True)
    assert type(loss) is kind
    assert loss.cfg is cfg
    assert loss.use_fused_linear_logprobs


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
