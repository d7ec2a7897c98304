from collections.abc import Callable

import pytest
import torch
from refusals import refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import LossInputType, LossType, MseValueLossFn

BatchMaker = Callable[..., tuple[torch.Tensor, BatchedDataDict]]


@pytest.fixture
def states(make_batch: BatchMaker) -> tuple[torch.Tensor, BatchedDataDict]:
    _, data = make_batch()
    generator = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, *data["token_mask"].shape, generator=generator, dtype=torch.float64)
    data["values"], data["returns"] = old, returns
    return values.requires_grad_(), data


def textbook(values: torch.Tensor, data: BatchedDataDict, scale: float, clip: float | None, n: float):
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
def test_the_textbook_over_all_columns(
    scale: float, clip: float | None, states: tuple[torch.Tensor, BatchedDataDict]
):
    values, data = states
    loss, metrics = MseValueLossFn({"scale": scale, "cliprange": clip})(values, data, 3, 17)
    expected = textbook(values, data, scale, clip, 17)
    assert metrics == pytest.approx(expected)
    assert loss.item() == pytest.approx(expected["loss"])
    if clip is not None:
        assert expected["vf_clipfrac"] > 0  # the case is in the batch


def test_the_gradient_stops_where_the_held_value_counts(states: tuple[torch.Tensor, BatchedDataDict]):
    values, data = states
    loss, _ = MseValueLossFn({"cliprange": 0.2})(values, data, 3, 17)
    gradient = torch.autograd.grad(loss, values)[0]
    old, target = data["values"], data["returns"]
    held = torch.minimum(torch.maximum(values, old - 0.2), old + 0.2)
    worse = (held - target).square() > (values - target).square()
    mask = data["token_mask"] * data["sample_mask"][:, None]
    torch.testing.assert_close(gradient, torch.where(worse, 0.0, (values - target) * mask / 17).detach())


def test_a_row_that_only_fills_a_microbatch_is_not_counted(states: tuple[torch.Tensor, BatchedDataDict]):
    values, data = states
    data["input_lengths"] = torch.tensor([7, 7, 7, 7, 0])
    assert MseValueLossFn({})(values, data, 3, 17)[1]["num_valid_samples"] == 4


def test_what_it_says_of_itself_and_asks_for(states: tuple[torch.Tensor, BatchedDataDict]):
    values, data = states
    loss_fn = MseValueLossFn({"cliprange": 0.2}, use_fused_linear_logprobs=True)
    assert (loss_fn.loss_type, loss_fn.input_type) == (LossType.TOKEN_LEVEL, LossInputType.VALUE)
    del data["values"]
    with refused("missing-column", "'values'", "cliprange: 0.2"):
        loss_fn(values, data, 3, 17)
    MseValueLossFn({})(values, data, 3, 17)
    with refused("column-shape", "values"):
        MseValueLossFn({})(values[:, 1:], data, 3, 17)
