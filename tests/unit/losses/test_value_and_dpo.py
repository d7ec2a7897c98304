import pytest
import torch
from refusals import refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import DPOLossFn, MseValueLossFn


@pytest.fixture
def states(make_batch):
    _, data = make_batch()
    generator = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, *data["token_mask"].shape, generator=generator, dtype=torch.float64)
    data["values"], data["returns"] = old, returns
    return values.requires_grad_(), data


def textbook(values, data, scale, clip, n):
    rows = zip(values.tolist(), data["values"].tolist(), data["returns"].tolist(), strict=True)
    seen, loss, clipped, errors, returns = [], 0.0, 0, 0.0, []
    for row, (now, old, target) in enumerate(rows):
        for t, (v, o, r) in enumerate(zip(now, old, target, strict=True)):
            if data["token_mask"][row, t] and data["sample_mask"][row]:
                error = (v - r) ** 2
                held = error if clip is None else (min(max(v, o - clip), o + clip) - r) ** 2
                loss += 0.5 * scale * max(error, held)
                clipped += held > error
                errors += error
                seen.append(v)
                returns.append(r)
    return {
        "loss": loss / n,
        "vf_clipfrac": clipped / n,
        "returns_mean": sum(returns) / n,
        "values_mean": sum(seen) / n,
        "returns_sq_mean": sum(r * r for r in returns) / n,
        "residual_sq_mean": errors / n,
        "values_min": min(seen),
        "values_max": max(seen),
        "num_valid_samples": len(values),
    }


@pytest.mark.parametrize(("scale", "clip"), [(1.0, None), (0.5, 0.2), (2.0, 1.0)])
def test_the_textbook_over_all_columns(scale, clip, states):
    values, data = states
    loss, metrics = MseValueLossFn({"scale": scale, "cliprange": clip})(values, data, 3, 17)
    expected = textbook(values, data, scale, clip, 17)
    assert metrics == pytest.approx(expected)
    assert loss.item() == pytest.approx(expected["loss"])
    if clip is not None:
        assert expected["vf_clipfrac"] > 0  # the case is in the batch


def test_the_gradient_stops_where_the_held_value_counts(states):
    values, data = states
    loss, _ = MseValueLossFn({"cliprange": 0.2})(values, data, 3, 17)
    gradient = torch.autograd.grad(loss, values)[0]
    old, target = data["values"], data["returns"]
    held = torch.minimum(torch.maximum(values, old - 0.2), old + 0.2)
    worse = (held - target).square() > (values - target).square()
    mask = data["token_mask"] * data["sample_mask"][:, None]
    torch.testing.assert_close(gradient, torch.where(worse, 0.0, (values - target) * mask / 17).detach())


def test_a_row_that_only_fills_a_microbatch_is_not_counted(states):
    values, data = states
    data["input_lengths"] = torch.tensor([7, 7, 7, 7, 0])
    assert MseValueLossFn({})(values, data, 3, 17)[1]["num_valid_samples"] == 4


def test_columns_that_lack_or_do_not_fit_are_refused(states):
    values, data = states
    del data["values"]
    with refused("missing-column", "'values'", "cliprange: 0.2"):
        MseValueLossFn({"cliprange": 0.2})(values, data, 3, 17)
    MseValueLossFn({})(values, data, 3, 17)
    with refused("column-shape", "values"):
        MseValueLossFn({})(values[:, 1:], data, 3, 17)


# DPO


@pytest.fixture
def pairs(make_batch):
    """Three pairs; the second one is dropped, and every row has a token."""
    c, data = make_batch(rows=6)
    data["token_mask"][:, 2] = 1
    data["sample_mask"] = torch.tensor([1, 1, 0, 0, 1, 1], dtype=torch.float64)
    data["reference_policy_logprobs"] = data["reference_policy_logprobs"].roll(-1, dims=1)
    return c, data


def of_the_paper(c, data, cfg, n_seq):
    """Sentence by sentence from the paper."""
    beta = cfg.get("reference_policy_kl_penalty", 0.05)
    names = ("preference_loss", "sft_loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean")
    sums = dict.fromkeys(names, 0.0)
    count = 0

    def of_row(row, *, likelihood, average):
        total, tokens = c.new_zeros(()), 0
        for t in range(c.shape[1]):
            if data["token_mask"][row, t + 1]:
                ref = 0.0 if likelihood else data["reference_policy_logprobs"][row, t].item()
                total, tokens = total + c[row, t] - ref, tokens + 1
        return total / tokens if average else total

    for pair in range(len(c) // 2):
        if not data["sample_mask"][2 * pair]:
            continue
        count += 1
        average = cfg.get("preference_average_log_probs", False)
        chosen, rejected = (of_row(2 * pair + i, likelihood=False, average=average) for i in (0, 1))
        sums["preference_loss"] += torch.nn.functional.softplus(-beta * (chosen - rejected))
        sums["accuracy"] += float(chosen > rejected)
        sums["rewards_chosen_mean"] += chosen
        sums["rewards_rejected_mean"] += rejected
        if cfg.get("sft_loss_weight", 0):
            sums["sft_loss"] -= of_row(
                2 * pair, likelihood=True, average=cfg.get("sft_average_log_probs", False)
            )
    result = {name: value / (n_seq / 2) for name, value in sums.items()}
    result["loss"] = (
        cfg.get("preference_loss_weight", 1.0) * result["preference_loss"]
        + cfg.get("sft_loss_weight", 0.0) * result["sft_loss"]
    )
    return result | {"num_valid_samples": count}


SETTINGS = [
    {},
    {"reference_policy_kl_penalty": 0.7},
    {"preference_average_log_probs": True},
    {"sft_loss_weight": 0.3},
    {"sft_loss_weight": 0.3, "sft_average_log_probs": True, "preference_loss_weight": 2.0},
    {"sft_loss_weight": 1.0, "preference_loss_weight": 0.0},
]


@pytest.mark.parametrize("cfg", SETTINGS, ids=str)
def test_dpo_is_that_of_the_paper(cfg, pairs):
    c, data = pairs
    loss, metrics = DPOLossFn(cfg)(c, data, 4, 23)
    expected = of_the_paper(c, data, cfg, 4)
    (gradient,) = torch.autograd.grad(loss, c)
    (expected_gradient,) = torch.autograd.grad(expected["loss"], c)
    torch.testing.assert_close(gradient, expected_gradient)
    expected = {name: float(torch.as_tensor(value).detach()) for name, value in expected.items()}
    assert metrics == pytest.approx(expected, abs=1e-7)
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-7)


def test_an_odd_number_of_rows_is_refused(pairs):
    c, data = pairs
    with refused("rows-per-sample", 5):
        DPOLossFn({})(c[:5], data.slice(0, 5), 4, 23)


@pytest.mark.parametrize("masked", [0, 1])
def test_a_pair_with_one_row_masked_follows_its_chosen_row(masked, pairs):
    c, data = pairs
    sample_mask = torch.ones_like(data["sample_mask"])
    sample_mask[2 + masked] = 0.0
    half = BatchedDataDict(data, sample_mask=sample_mask)
    both = BatchedDataDict(data, sample_mask=torch.ones_like(sample_mask))
    if masked == 0:
        both["sample_mask"][2:4] = 0.0
    assert DPOLossFn({})(c, half, 4, 23)[1] == DPOLossFn({})(c, both, 4, 23)[1]
