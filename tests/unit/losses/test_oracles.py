"""Losses and gradients against TRL's, in fp64: its trainers' own loss methods, called on what those read of a trainer.

B rows of P prompt and T answer tokens over V words. Both sides start from the same logits [B,T,V].
"""

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import ClippedPGLossFn, DPOLossFn

pytestmark = pytest.mark.needs("test-oracle")

B, P, T, V = 6, 3, 5, 17
CAP = 1.2


@pytest.fixture(scope="module")
def trl():
    with warnings.catch_warnings():
        # What its dependencies warn about while they load is not ours.
        warnings.simplefilter("ignore")
        import trl

        return SimpleNamespace(grpo=trl.GRPOTrainer, dpo=trl.DPOTrainer)


@pytest.fixture
def x():
    """Answers of uneven length, and what several policies say of them."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = normal(B, T, V).requires_grad_()
    answers = torch.randint(0, V, (B, T), generator=generator)
    mask = torch.ones(B, T, dtype=torch.float64)
    mask[1, 3:] = 0
    mask[4, 2:] = 0
    current = logprobs_of(logits, answers).detach()
    old = current + 0.5 * normal(B, T)
    return SimpleNamespace(
        logits=logits,
        answers=answers,
        mask=mask,
        advantages=normal(B).abs() * torch.tensor([1, -1] * (B // 2)),
        old=old,
        generation=old + 0.3 * normal(B, T),
        reference=old + 0.2 * normal(B, T),
    )


def logprobs_of(logits, answers):
    return logits.log_softmax(-1).gather(2, answers[..., None]).squeeze(2)


class Alone:
    """An accelerator of one process."""

    num_processes = 1
    device = torch.device("cpu")

    def gather(self, values):
        return values

    gather_for_metrics = gather

    def reduce(self, values, **_):
        return values


def trainer(**keys):
    """What both loss methods read of their trainer."""
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=Alone(),
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **keys,
    )


def gradient(loss, logits):
    return torch.autograd.grad(loss, logits)[0]


def behind_the_prompt(values):
    """[B,S] from [B,T]: zeros on the prompt."""
    return torch.cat([values.new_zeros(len(values), P), values], dim=1)


# --- GRPO and its family ------------------------------------------------------------------------------------


def grpo_of_trl(trl, x, loss_type, **keys):
    args = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1, "report_to": []}
    args |= {key: keys.pop(key) for key in list(keys) if key in args}
    settings = {
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "max_completion_length": T,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
    }
    stand_in = trainer(loss_type=loss_type, args=SimpleNamespace(**args), **(settings | keys))

    def model_pass(*_, **__):
        logp = x.logits.log_softmax(-1)
        return logprobs_of(x.logits, x.answers), -(logp.exp() * logp).sum(-1).detach(), None

    stand_in._get_per_token_logps_and_entropies = model_pass
    return trl.grpo._compute_loss(
        stand_in,
        None,
        {
            "prompt_ids": torch.zeros(B, P, dtype=torch.long),
            "prompt_mask": torch.ones(B, P),
            "completion_ids": x.answers,
            "completion_mask": x.mask,
            "advantages": x.advantages,
            "old_per_token_logps": x.old,
            "ref_per_token_logps": x.reference,
            "importance_sampling_ratio": (x.old - x.generation).exp().clamp(max=CAP),
            "num_items_in_batch": x.mask.sum(),
        },
    )


def ours(x, **keys):
    loss_fn = ClippedPGLossFn(
        {
            "reference_policy_kl_penalty": 0.0,
            "ratio_clip_max": 0.28,
            "kl_input_clamp_value": None,
            "kl_output_clamp_value": None,
        }
        | keys
    )
    batch = BatchedDataDict(
        token_mask=behind_the_prompt(x.mask),
        sample_mask=torch.ones(B, dtype=torch.float64),
        advantages=x.advantages[:, None].expand(B, P + T),
        prev_logprobs=behind_the_prompt(x.old),
        generation_logprobs=behind_the_prompt(x.generation),
        reference_policy_logprobs=behind_the_prompt(x.reference),
    )
    current = behind_the_prompt(logprobs_of(x.logits, x.answers))[:, 1:]
    return loss_fn(current, batch, B, x.mask.sum())[0]


PER_ROW = {"token_level_loss": False}
TIS = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": CAP,
}
VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": True}
PAIRS = {
    "GRPO": ({"loss_type": "grpo"}, PER_ROW),
    "GRPO by tokens": ({"loss_type": "bnpo"}, {}),
    "DAPO": ({"loss_type": "dapo"}, {}),
    "PPO's clip": ({"loss_type": "dapo", "epsilon_high": 0.2}, {"ratio_clip_max": 0.2}),
    "dual clip": ({"loss_type": "dapo", "delta": 1.4}, {"ratio_clip_c": 1.4}),
    "GSPO": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.05,
            "epsilon_high": 0.06,
        },
        PER_ROW | {"sequence_level_importance_ratios": True, "ratio_clip_min": 0.05, "ratio_clip_max": 0.06},
    ),
    # TRL's bound is the ratio itself, and there is none below.
    "CISPO": ({"loss_type": "cispo", "epsilon_high": 1.28}, {"use_cispo": True, "ratio_clip_min": 1.0}),
    "truncated importance sampling": ({"loss_type": "dapo"} | VLLM, TIS),
    "truncated importance sampling, by rows": ({"loss_type": "grpo"} | VLLM, PER_ROW | TIS),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_policy_gradient_is_that_of_trl(name, trl, x):
    theirs, keys = PAIRS[name]
    expected, found = grpo_of_trl(trl, x, **theirs), ours(x, **keys)
    if keys:
        assert abs(found - ours(x)) > 1e-3, "the rows are such that the settings matter"
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(gradient(found, x.logits), gradient(expected, x.logits), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["GRPO", "DAPO"])
def test_the_kl_penalty_is_that_of_trl(name, trl, x):
    """With the ratio to the sampling policy on it, which makes its gradient that of the divergence."""
    theirs, keys = PAIRS[name]
    x.generation = x.old
    expected = grpo_of_trl(trl, x, **theirs, beta=0.4, use_bias_correction_kl=True)
    found = ours(x, **keys, reference_policy_kl_penalty=0.4, use_on_policy_kl_approximation=True)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(gradient(found, x.logits), gradient(expected, x.logits), rtol=1e-7, atol=1e-9)
    assert abs(expected - grpo_of_trl(trl, x, **theirs)) > 1e-3, "it is in the loss"


def test_the_value_of_the_plain_penalty_is_that_of_trl(trl, x):
    expected = grpo_of_trl(trl, x, "grpo", beta=0.4)
    found = ours(x, **PER_ROW, reference_policy_kl_penalty=0.4)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_dr_grpo_divides_by_a_constant_where_we_divide_by_the_tokens(trl, x):
    expected = grpo_of_trl(trl, x, "dr_grpo") * (B * T) / x.mask.sum()
    found = ours(x)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(gradient(found, x.logits), gradient(expected, x.logits), rtol=1e-7, atol=1e-9)


# --- DPO ----------------------------------------------------------------------------------------------------


def dpo_of_trl(trl, x, losses):
    """TRL holds all chosen answers first, then all rejected ones."""
    order = [*range(0, len(x.mask), 2), *range(1, len(x.mask), 2)]
    logprobs = (logprobs_of(x.logits, x.answers) * x.mask)[order]
    reference = (x.reference * x.mask).sum(1)
    shape = len(order), P + T - 1
    outputs = SimpleNamespace(
        log_probs=behind_the_prompt(logprobs)[:, 1:],
        entropy=torch.zeros(shape),
        mean_logits=torch.zeros(shape),
        is_top1=torch.zeros(shape, dtype=torch.bool),
    )
    stand_in = trainer(
        precompute_ref_logps=True,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        beta=0.3,
        loss_types=list(losses),
        loss_weights=list(losses.values()),
        use_weighting=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )
    completion_mask = behind_the_prompt(x.mask)[order].long()
    inputs = {
        "input_ids": torch.zeros_like(completion_mask),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
        "ref_chosen_logps": reference[::2],
        "ref_rejected_logps": reference[1::2],
    }
    loss = trl.dpo._compute_loss(stand_in, lambda **_: outputs, inputs, False)
    return loss, {name: values[-1] for name, values in stand_in._metrics["train"].items()}


def our_dpo(x, **keys):
    rows = len(x.mask)
    batch = BatchedDataDict(
        token_mask=behind_the_prompt(x.mask),
        sample_mask=torch.ones(rows, dtype=torch.float64),
        reference_policy_logprobs=behind_the_prompt(x.reference).roll(-1, dims=1),
    )
    current = behind_the_prompt(logprobs_of(x.logits, x.answers))[:, 1:]
    return DPOLossFn({"reference_policy_kl_penalty": 0.3} | keys)(current, batch, rows, x.mask.sum())


@pytest.mark.parametrize(
    ("losses", "keys"),
    [
        ({"sigmoid": 1.0}, {}),
        ({"sigmoid": 2.5}, {"preference_loss_weight": 2.5}),
        ({"sigmoid_norm": 1.0}, {"preference_average_log_probs": True}),
    ],
)
def test_dpo_is_that_of_trl(losses, keys, trl, x):
    (expected, reported), (found, metrics) = dpo_of_trl(trl, x, losses), our_dpo(x, **keys)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(gradient(found, x.logits), gradient(expected, x.logits), rtol=1e-7, atol=1e-9)
    assert metrics["accuracy"] == pytest.approx(reported["rewards/accuracies"], abs=1e-6)
    if "sigmoid" in losses:  # TRL's rewards are sums times beta
        assert 0.3 * metrics["rewards_chosen_mean"] == pytest.approx(reported["rewards/chosen"])
        assert 0.3 * metrics["rewards_rejected_mean"] == pytest.approx(reported["rewards/rejected"])


def test_the_likelihood_beside_dpo_is_that_of_trl_for_one_pair(trl, x):
    """TRL averages over the tokens of all chosen answers, we over each one's: the same for a single answer."""
    x.answers, x.mask, x.reference = (values[:2] for values in (x.answers, x.mask, x.reference))
    x.logits = x.logits[:2].detach().requires_grad_()
    expected, _ = dpo_of_trl(trl, x, {"sigmoid": 1.0, "sft": 0.7})
    found, _ = our_dpo(x, sft_loss_weight=0.7, sft_average_log_probs=True)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(gradient(found, x.logits), gradient(expected, x.logits), rtol=1e-7, atol=1e-8)
