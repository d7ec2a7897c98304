import math

import pytest
import torch
from refusals import refused
from torch.distributions import Categorical, kl_divergence

from nemo_rl_mcore.losses import (
    ClippedPGLossFn,
    DistillationLossFn,
    DistillationOutputs,
    LossInputType,
    TopKLogprobs,
)

VOCABULARY = 11
KINDS = [
    {"kl_type": "forward"},
    {"kl_type": "reverse"},
    {"kl_type": "mixed", "mixed_kl_weight": 0.3},
    {"kl_type": "jsd"},
    {"kl_type": "jsd", "jsd_beta": 0.2},
]


@pytest.fixture
def data(make_batch):
    return make_batch()[1]


@pytest.fixture
def logits(data):
    """Student, which requires a gradient, and teacher."""
    rows, columns = data["token_mask"].shape
    generator = torch.Generator().manual_seed(3)
    student, teacher = (
        torch.randn(2, rows, columns - 1, VOCABULARY, generator=generator, dtype=torch.float64)
        .mul(2)
        .unbind()
    )
    return student.clone().requires_grad_(), teacher.clone()


def topk(logits, k):
    """Log-probabilities under the full vocabulary at the teacher's k best ids."""
    student, teacher = (x.log_softmax(-1) for x in logits)
    best = teacher.topk(k, dim=-1).indices
    return student.gather(-1, best), teacher.gather(-1, best)


def oracle(cfg, student, teacher):
    """[B,S-1] by torch.distributions, over whatever outcomes the last dimension has (they add up to 1)."""
    s, t = Categorical(probs=student.exp()), Categorical(probs=teacher.exp())
    match cfg["kl_type"]:
        case "forward":
            return kl_divergence(t, s)
        case "reverse":
            return kl_divergence(s, t)
        case "mixed":
            w = cfg["mixed_kl_weight"]
            return w * kl_divergence(t, s) + (1 - w) * kl_divergence(s, t)
    beta = cfg.get("jsd_beta", 0.5)
    m = Categorical(probs=beta * t.probs + (1 - beta) * s.probs)
    return beta * kl_divergence(t, m) + (1 - beta) * kl_divergence(s, m)


def with_rest(logprobs):
    return torch.cat([logprobs, (1 - logprobs.exp().sum(-1, keepdim=True)).log()], dim=-1)


def mean(values, data, count):
    return (values * data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum() / count


@pytest.mark.parametrize("cfg", KINDS, ids=str)
@pytest.mark.parametrize("k", [4, VOCABULARY])
def test_it_is_the_divergence_of_the_distributions_coarsened_to_ids_and_tail(cfg, k, logits, data):
    """Over the whole vocabulary, of themselves."""
    student, teacher = given = topk(logits, k)
    loss, metrics = DistillationLossFn(cfg)(student, teacher, data, 3, 17)
    compared = map(with_rest, given) if k < VOCABULARY else (x.log_softmax(-1) for x in logits)
    expected = mean(oracle(cfg, *compared), data, 17)
    torch.testing.assert_close(loss, expected)
    assert metrics["loss"] == metrics["kl"] == pytest.approx(expected.item())
    assert metrics["teacher_topk_mass"] == pytest.approx(mean(teacher.exp().sum(-1), data, 17).item())
    gradients = [torch.autograd.grad(value, logits[0], retain_graph=True)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("cfg", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_over_the_whole_vocabulary_a_model_whose_tail_is_empty_needs_no_tail_of_the_teacher(
    cfg, dtype, logits, data
):
    given = logits[0].detach().to(dtype).requires_grad_(), logits[1].to(dtype)
    student, teacher = topk(given, VOCABULARY)
    empty = torch.full(student.shape[:-1], -math.inf, dtype=dtype)
    losses = [
        DistillationLossFn(cfg).sums(
            DistillationOutputs(TopKLogprobs(student, empty), TopKLogprobs(teacher, tail)), data
        )
        for tail in (None, empty)
    ]
    expected = mean(oracle(cfg, *(x.log_softmax(-1) for x in logits)), data, 1)
    assert losses[0].loss.item() == pytest.approx(
        expected.item(), rel=1e-6 if dtype is torch.float32 else 1e-12
    )
    without, with_tail = (torch.autograd.grad(found.loss, given[0], retain_graph=True)[0] for found in losses)
    assert torch.equal(losses[0].loss, losses[1].loss)
    assert torch.equal(without, with_tail)
    wanted = torch.autograd.grad(expected, logits[0])[0]
    torch.testing.assert_close(without.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cfg", KINDS, ids=str)
@pytest.mark.parametrize("k", [1, 4, VOCABULARY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_student_that_equals_its_teacher_has_no_loss_and_no_gradient(cfg, k, dtype, logits, data):
    student = logits[1].to(dtype).requires_grad_()
    loss, _ = DistillationLossFn(cfg)(*topk((student, logits[1].to(dtype)), k), data, 3, 17)
    # The logarithm of the mixture of equal sides is rounded; the other divergences see no difference at all.
    assert 0 <= loss.item() <= (torch.finfo(dtype).eps ** 2 if cfg["kl_type"] == "jsd" else 0)
    gradient = torch.autograd.grad(loss, student)[0]
    assert gradient.abs().max() < 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize("cfg", KINDS, ids=str)
def test_never_negative_near_the_teacher_in_fp32(cfg, logits, data):
    teacher = logits[1].float()
    for noise in (1e-7, 1e-5, 1e-3, 1e-1):
        student = teacher + noise * logits[0].detach().float()
        for k in (1, 4, VOCABULARY):
            assert DistillationLossFn(cfg)(*topk((student, teacher), k), data, 3, 17)[0].item() >= 0


def test_without_the_tail_it_is_the_plain_sum_and_can_be_negative(logits, data):
    student, teacher = topk(logits, 1)
    loss, _ = DistillationLossFn({"tail_mass": False, "kl_type": "reverse"})(student, teacher, data, 3, 17)
    expected = mean((student.exp() * (student - teacher)).sum(-1), data, 17)
    torch.testing.assert_close(loss, expected)
    assert loss.item() < 0


def test_tails_given_by_the_model_keep_digits_that_the_sum_has_lost(data):
    """Nearly all mass on one id: the rest is 1e-12, which one minus the sum cannot tell in fp32."""
    shape = data["token_mask"][:, 1:].shape
    teacher_rest, student_rest = (torch.full(shape, math.log(rest)) for rest in (1e-12, 1e-30))
    one = torch.zeros(*shape, 1)
    outputs = DistillationOutputs(TopKLogprobs(one, student_rest), TopKLogprobs(one, teacher_rest))
    sums = DistillationLossFn({"kl_type": "forward"}).sums(outputs, data)
    valid = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum().item()
    expected = valid * (1e-12 * math.log(1e18) - 1e-12)
    assert sums.loss.item() == pytest.approx(expected, rel=1e-4)


def test_the_policy_gradient_beside_it(logits, data, make_batch):
    c, _ = make_batch()
    rl = {"reference_policy_kl_penalty": 0.0, "entropy_coef": 0.1}
    loss_fn = DistillationLossFn({"rl_weight": 0.5, "rl": rl})
    assert loss_fn.needs_entropy
    entropy = data["entropy"][:, 1:]
    loss, metrics = loss_fn(*topk(logits, 4), data, 3, 17, c, entropy)
    alone = DistillationLossFn({})(*topk(logits, 4), data, 3, 17)[0]
    policy, policy_metrics = ClippedPGLossFn(rl)(c, data, 3, 17, entropy)
    torch.testing.assert_close(loss, alone + 0.5 * policy)
    assert metrics["rl_loss"] == policy_metrics["loss"]
    assert metrics["probs_ratio"] == policy_metrics["probs_ratio"]
    with pytest.raises(ValueError, match=r"rl_weight: 0\.5 needs"):
        loss_fn(*topk(logits, 4), data, 3, 17)


def test_shapes_that_do_not_fit_are_refused(logits, data):
    student, teacher = topk(logits, 4)
    loss_fn = DistillationLossFn({})
    assert loss_fn.input_type is LossInputType.DISTILLATION
    with refused("teacher-shape"):
        loss_fn(student[..., :3], teacher, data, 3, 17)
    with refused("teacher-shape"):
        loss_fn(student[:, 1:], teacher[:, 1:], data, 3, 17)
