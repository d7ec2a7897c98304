"""ClippedPGLossFn against a textbook written row by row and token by token."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from nemo_rl_mcore.config import ClippedPGLossConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import ClippedPGLossFn

IS = {"use_importance_sampling_correction": True}
TIS = IS | {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.3}
BOUNDS = {"truncated_importance_sampling_ratio": 1.2, "truncated_importance_sampling_ratio_min": 0.8}
SEQUENCE = {"token_level_loss": False}
SEQ_MASK = IS | BOUNDS | {"truncated_importance_sampling_type": "seq-mask-tis"}
GSPO = SEQUENCE | {"sequence_level_importance_ratios": True}


def kl(penalty, kind="k3", **keys):
    return {"reference_policy_kl_penalty": penalty, "reference_policy_kl_type": kind} | keys


VARIANTS = {
    "grpo": {},
    "dapo": {"ratio_clip_max": 0.28, "reference_policy_kl_penalty": 0.0},
    "sequence-level loss": SEQUENCE,
    "dual clip": {"ratio_clip_c": 1.1},
    "gspo": GSPO,
    "gspo, corrected": GSPO | IS,
    "gspo, tis": GSPO | TIS,
    "gspo, icepop": GSPO | IS | BOUNDS | {"truncated_importance_sampling_type": "icepop"},
    "gspo, dual clip": GSPO | {"ratio_clip_c": 1.05},
    "cispo": {"use_cispo": True},
    "cispo, tis": TIS | {"use_cispo": True},
    "reinforce": {"disable_ppo_ratio": True},
    "reinforce, sequence-level, corrected": SEQUENCE | IS | {"disable_ppo_ratio": True},
    "on-policy": {"force_on_policy_ratio": True},
    "on-policy before reinforce": IS | {"force_on_policy_ratio": True, "disable_ppo_ratio": True},
    "corrected": IS,
    "tis": TIS,
    "tis with a floor": TIS | {"truncated_importance_sampling_ratio_min": 0.7},
    "icepop": IS | BOUNDS | {"truncated_importance_sampling_type": "icepop"},
    "seq-mask-tis": SEQ_MASK,
    "seq-mask-tis, sequence-level loss": SEQUENCE | SEQ_MASK,
    "k1": kl(0.3, "k1"),
    "k2": kl(0.3, "k2"),
    "k1, a tight clamp": kl(0.5, "k1", kl_output_clamp_value=0.05),
    "k3, tight clamps": kl(0.5, kl_input_clamp_value=0.4, kl_output_clamp_value=0.05),
    "k3, no clamps": kl(0.5, kl_input_clamp_value=None, kl_output_clamp_value=None),
    "on-policy kl": kl(0.5, use_on_policy_kl_approximation=True),
    "on-policy kl, clamped, per sequence": SEQUENCE
    | kl(0.5, use_on_policy_kl_approximation=True, kl_input_clamp_value=0.3, kl_output_clamp_value=0.1),
    "kl in reward": kl(0.5, use_kl_in_reward=True),
    "entropy bonus": {"entropy_coef": 0.1},
    "entropy bonus, per sequence": SEQUENCE | {"entropy_coef": 0.1},
}


# --- the textbook -----------------------------------------------------------------------------------------


def clamp(x, low, high):
    return x if low <= x.item() <= high else torch.tensor(low if x.item() < low else high, dtype=x.dtype)


def safe(x):
    return x if math.isfinite(x) else 0.0


def plain_kl(kind, q):
    exp = q.exp() if isinstance(q, torch.Tensor) else math.exp(q)
    return {"k1": -q, "k2": q * q / 2, "k3": exp - 1 - q}[kind]


class Textbook:
    """The loss and metrics of a batch, with scalars only; the masks are applied by skipping."""

    def __init__(self, cfg, c, data):
        self.cfg, self.c = cfg, c
        p = c.detach() if cfg.force_on_policy_ratio else data["prev_logprobs"][:, 1:]
        self.p, self.g = p.tolist(), data["generation_logprobs"][:, 1:].tolist()
        self.r = data["reference_policy_logprobs"][:, 1:].tolist()
        self.advantages = data["advantages"][:, 1:].tolist()
        self.entropy = data["entropy"][:, 1:]
        self.sample = data["sample_mask"].tolist()
        mask = data["token_mask"][:, 1:].tolist()
        self.columns = [[t for t, on in enumerate(row) if on] for row in mask]
        self.rows = [b for b, keep in enumerate(self.sample) if keep]
        self.tokens = [(b, t) for b in self.rows for t in self.columns[b]]
        self.n_seq, self.n_tok = len(self.rows) + 1e-8, len(self.tokens) + 1e-8

    def row_mean(self, values):
        return sum(values) / (len(values) + 1e-8)

    def over_tokens(self, f):
        return sum((f(b, t) for b, t in self.tokens), torch.zeros((), dtype=torch.float64)) / self.n_tok

    def over_rows(self, f):
        return sum((f(b) for b in self.rows), torch.zeros((), dtype=torch.float64)) / self.n_seq

    def as_gradient(self, f):
        if self.cfg.token_level_loss:
            return self.over_tokens(f)
        return self.over_rows(lambda b: self.row_mean([f(b, t) for t in self.columns[b]]))

    def ratio(self, b, t):
        if self.cfg.force_on_policy_ratio:
            return (self.c[b, t] - self.c[b, t].detach()).exp()
        if self.cfg.disable_ppo_ratio:
            return self.c[b, t]
        if self.cfg.sequence_level_importance_ratios:
            differences = [self.c[b, u] - self.p[b][u] for u in self.columns[b]]
            return self.row_mean(differences).exp()
        return (self.c[b, t] - self.p[b][t]).exp()

    def clipped(self, b, t):
        if self.cfg.disable_ppo_ratio and not self.cfg.force_on_policy_ratio:
            return self.ratio(b, t)
        return clamp(self.ratio(b, t), 1 - self.cfg.ratio_clip_min, 1 + self.cfg.ratio_clip_max)

    def surrogate(self, b, t):
        a = self.advantages[b][t]
        if self.cfg.use_cispo:
            return -a * self.clipped(b, t).detach() * self.c[b, t]
        plain, clipped = -a * self.ratio(b, t), -a * self.clipped(b, t)
        worst = plain if plain.item() >= clipped.item() else clipped
        bound = self.cfg.ratio_clip_c
        if bound is not None and a < 0 and worst.item() > -a * bound:
            return torch.tensor(-a * bound, dtype=torch.float64)
        return worst

    def raw_weight(self, b, t):
        if self.cfg.sequence_level_importance_ratios:
            return safe(math.exp(sum(self.p[b][u] - self.g[b][u] for u in self.columns[b])))
        return safe(math.exp(self.p[b][t] - self.g[b][t]))

    def bounds(self):
        low = self.cfg.truncated_importance_sampling_ratio_min
        high = self.cfg.truncated_importance_sampling_ratio
        assert high is not None
        return (0.0 if low is None else low), high

    def weight(self, b, t):
        w, kind = self.raw_weight(b, t), self.cfg.truncated_importance_sampling_type
        if kind is None:
            return w
        low, high = self.bounds()
        if kind == "tis":
            return min(max(w, low), high)
        if kind == "icepop":
            return w if low <= w <= high else 0.0
        return 0.0 if self.row_is_out(b) else w

    def row_is_out(self, b):
        low, high = self.bounds()
        mean = self.row_mean([self.p[b][u] - self.g[b][u] for u in self.columns[b]])
        return not low <= math.exp(mean) <= high

    def out_of_bounds(self):
        low, high = self.bounds()
        if self.cfg.truncated_importance_sampling_type == "seq-mask-tis":
            return self.over_rows(lambda b: float(self.row_is_out(b)))
        return self.over_tokens(lambda b, t: float(not low <= self.raw_weight(b, t) <= high))

    def kl(self, b, t):
        c = self.c[b, t]
        start = self.g[b][t] if self.cfg.use_on_policy_kl_approximation else c.detach()
        factor = (c - start).exp()
        q = self.r[b][t] - c
        limit = self.cfg.kl_input_clamp_value
        if limit is not None and abs(q.item()) > limit:
            q = clamp(q, -limit, limit)
            factor = factor.detach()
        kl = factor * plain_kl(self.cfg.reference_policy_kl_type, q)
        limit = self.cfg.kl_output_clamp_value
        return kl if limit is None else clamp(kl, -limit, limit)

    def mismatch(self, b, t):
        c, p, g, kind = self.c[b, t].item(), self.p[b][t], self.g[b][t], self.cfg.reference_policy_kl_type
        mixture = math.log(0.5 * math.exp(p) + 0.5 * math.exp(g))
        js = sum(0.5 * (math.exp(x - mixture) - (x - mixture) - 1) for x in (p, g))
        return {
            "token_mult_prob_error": math.exp(abs(g - p)),
            "gen_kl_error": plain_kl(kind, p - g),
            "policy_kl_error": plain_kl(kind, g - p),
            "js_divergence_error": js,
            "approx_entropy": -math.exp(c - g) * c,
        }

    def result(self):
        cfg = self.cfg
        corrected = cfg.use_importance_sampling_correction
        loss = self.as_gradient(lambda b, t: (self.weight(b, t) if corrected else 1) * self.surrogate(b, t))
        penalized = not cfg.use_kl_in_reward and cfg.reference_policy_kl_penalty != 0
        kl = self.as_gradient(self.kl) if penalized else 0.0
        loss = loss + cfg.reference_policy_kl_penalty * kl
        if cfg.entropy_coef:
            loss = loss - cfg.entropy_coef * self.as_gradient(lambda b, t: self.entropy[b, t])
        metrics = {"loss": loss, "kl_penalty": kl, "num_valid_samples": sum(self.sample)}
        for name in ("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error"):
            metrics[name] = self.over_tokens(lambda b, t, name=name: self.mismatch(b, t)[name])
        metrics["approx_entropy"] = self.over_tokens(lambda b, t: self.mismatch(b, t)["approx_entropy"])
        if cfg.sequence_level_importance_ratios:
            metrics["sampling_importance_ratio"] = self.over_rows(lambda b: self.weight(b, 0))
        else:
            metrics["sampling_importance_ratio"] = self.over_tokens(self.weight)
        metrics["is_overflow_ratio"] = 0.0  # see test_overflow.py
        if cfg.truncated_importance_sampling_type is not None:
            metrics["is_oob_ratio"] = self.out_of_bounds()
        for name, f in (("probs_ratio", self.ratio), ("probs_ratio_clamped", self.clipped)):
            metrics[name] = self.over_tokens(f)
            values = [f(b, t).item() for b, t in self.tokens]
            metrics[f"{name}_min"] = min(values, default=math.inf)
            metrics[f"{name}_max"] = max(values, default=-math.inf)
        beyond = lambda b, t: torch.tensor(float(self.ratio(b, t) != self.clipped(b, t)))  # noqa: E731
        metrics["probs_ratio_clipfrac"] = self.over_tokens(beyond)
        metrics["entropy"] = self.over_tokens(lambda b, t: self.entropy[b, t])
        return loss, {
            name: float(torch.as_tensor(value, dtype=torch.float64).detach())
            for name, value in metrics.items()
        }


# --- the comparisons --------------------------------------------------------------------------------------


def counts(data):
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return data["sample_mask"].sum(), mask.sum()


def call(cfg, c, data):
    c = c.detach().clone().requires_grad_()
    loss, metrics = ClippedPGLossFn(cfg)(c, data, *counts(data), entropy=data["entropy"][:, 1:])
    (gradient,) = torch.autograd.grad(loss, c)
    return loss, metrics, gradient


def check_against_textbook(cfg, c, data):
    loss, metrics, gradient = call(cfg, c, data)
    expected, expected_metrics = Textbook(cfg, c, data).result()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert metrics == pytest.approx(expected_metrics, rel=1e-11, abs=1e-12)
    if expected.requires_grad:
        (expected_gradient,) = torch.autograd.grad(expected, c, allow_unused=True)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-12)
    else:
        assert not gradient.any()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_gives_the_textbook_loss_metrics_and_gradient(name, make_batch):
    for seed in range(3):
        check_against_textbook(ClippedPGLossConfig(**VARIANTS[name]), *make_batch(seed=seed))


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(sorted(VARIANTS)),
    rows=st.integers(1, 4),
    columns=st.integers(2, 5),
    seed=st.integers(0, 2**31),
    choices=st.data(),
)
def test_any_shape_and_mask_gives_the_textbook_numbers(name, rows, columns, seed, choices, make_batch):
    c, data = make_batch(rows, columns, seed)
    bits = st.lists(st.integers(0, 1), min_size=columns, max_size=columns)
    data["token_mask"] = torch.tensor(choices.draw(st.lists(bits, min_size=rows, max_size=rows)))
    sample = choices.draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows))
    data["sample_mask"] = torch.tensor(sample, dtype=torch.float64)
    check_against_textbook(ClippedPGLossConfig(**VARIANTS[name]), c, data)


def test_a_loss_travels_between_processes_and_is_built_from_a_mapping(make_batch):
    c, data = make_batch()
    for keys in VARIANTS.values():
        loss_fn = ClippedPGLossFn(dict(keys), use_fused_linear_logprobs=True)
        assert loss_fn.use_fused_linear_logprobs
        copy = pickle.loads(pickle.dumps(loss_fn))
        entropy = data["entropy"][:, 1:]
        assert copy(c, data, 4, 9, entropy)[1] == loss_fn(c, data, 4, 9, entropy)[1]


# --- examples by hand, and refusals -----------------------------------------------------------------------


def tiny(**columns):
    rows, width = len(columns["advantages"]), len(columns["advantages"][0])
    zeros = torch.zeros(rows, width + 1, dtype=torch.float64)
    data = BatchedDataDict(
        token_mask=torch.ones(rows, width + 1),
        sample_mask=torch.ones(rows),
        prev_logprobs=zeros,
        generation_logprobs=zeros,
        reference_policy_logprobs=zeros,
    )
    for key, values in columns.items():
        inner = torch.tensor(values, dtype=torch.float64)
        data[key] = torch.nn.functional.pad(inner, (1, 0))
    return data


def test_a_kl_weight_that_overflows_has_no_gradient():
    data = tiny(advantages=[[0.0]], generation_logprobs=[[-2000.0]], reference_policy_logprobs=[[-1.0]])
    c = torch.tensor([[-0.5]], dtype=torch.float64, requires_grad=True)
    cfg = ClippedPGLossConfig(use_on_policy_kl_approximation=True, reference_policy_kl_penalty=1.0)
    loss, _ = ClippedPGLossFn(cfg)(c, data, 1, 1)
    assert loss.item() == 0
    assert torch.autograd.grad(loss, c)[0].item() == 0


def test_the_numbers_do_not_depend_on_the_form_of_counts_and_masks(make_batch):
    c, data = make_batch(dtype=torch.float32)
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig())
    seqs, toks = counts(data)
    loss, metrics = loss_fn(c, data, seqs, toks)
    data["token_mask"], data["sample_mask"] = data["token_mask"].bool(), data["sample_mask"].long()
    for form in (int, float, lambda n: n.double(), lambda n: n.long()):
        again, again_metrics = loss_fn(c, data, form(seqs), form(toks))
        assert again.dtype is torch.float32
        torch.testing.assert_close(again, loss)
        assert again_metrics == pytest.approx(metrics)
    assert {type(value) for value in metrics.values()} == {float}


def test_shapes_that_do_not_fit_are_named(make_batch):
    c, data = make_batch()
    with refused("column-shape", "logprobs", [5, 5], [5, 6]):
        ClippedPGLossFn(ClippedPGLossConfig())(c[:, 1:], data, 1, 1)
    data["advantages"] = torch.zeros(5, 1)
    with refused("column-shape", "advantages"):
        ClippedPGLossFn(ClippedPGLossConfig())(c, data, 1, 1)


def test_the_entropy_bonus_needs_the_entropy(make_batch):
    c, data = make_batch()
    plain, bonus = (ClippedPGLossFn(ClippedPGLossConfig(entropy_coef=x)) for x in (0.0, 0.1))
    assert (plain.needs_entropy, bonus.needs_entropy) == (False, True)
    with pytest.raises(ValueError, match=r"entropy_coef: 0\.1"):
        bonus(c, data, 1, 1)
    assert "entropy" not in plain(c, data, 1, 1)[1]


def test_the_entropy_bonus_has_a_gradient(make_batch):
    c, data = make_batch()
    entropy = data["entropy"][:, 1:].clone().requires_grad_()
    loss, _ = ClippedPGLossFn(ClippedPGLossConfig(entropy_coef=0.1))(c, data, *counts(data), entropy=entropy)
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    (gradient,) = torch.autograd.grad(loss, entropy)
    torch.testing.assert_close(gradient, -0.1 * mask / mask.sum())


def test_a_forbidden_combination_is_refused_without_a_recipe():
    with pytest.raises(ValueError, match=r"use_cispo.*disable_ppo_ratio"):
        ClippedPGLossFn({"use_cispo": True, "disable_ppo_ratio": True})
