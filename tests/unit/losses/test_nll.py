import pickle
from collections.abc import Callable

import pytest
import torch

from nemo_rl_mcore.config import NLLLossConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import LossType, MetricKind, NLLLossFn, TokenOutputs

BatchMaker = Callable[..., tuple[torch.Tensor, BatchedDataDict]]


def textbook(c: torch.Tensor, data: BatchedDataDict) -> tuple[float, int, float]:
    total, tokens = 0.0, 0
    for b, keep in enumerate(data["sample_mask"].tolist()):
        for t, on in enumerate(data["token_mask"][b, 1:].tolist()):
            if keep and on:
                total, tokens = total - c[b, t].item(), tokens + 1
    return total, tokens, data["sample_mask"].sum().item()


@pytest.mark.parametrize("cfg", [None, NLLLossConfig()])
def test_the_mean_over_valid_tokens_and_its_metrics(cfg: NLLLossConfig | None, make_batch: BatchMaker):
    c, data = make_batch()
    total, tokens, samples = textbook(c, data)
    loss, metrics = NLLLossFn(cfg)(c, data, 17, 23)
    assert loss.item() == pytest.approx(total / 23)
    assert metrics == pytest.approx(
        {"loss": total / 23, "num_unmasked_tokens": tokens, "num_valid_samples": samples}
    )
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    torch.testing.assert_close(torch.autograd.grad(loss, c)[0], -mask / 23)


def test_what_it_says_of_itself(make_batch: BatchMaker):
    c, data = make_batch()
    loss_fn = pickle.loads(pickle.dumps(NLLLossFn(use_fused_linear_logprobs=True)))
    assert loss_fn.use_fused_linear_logprobs
    assert not loss_fn.needs_entropy
    assert loss_fn.loss_type is LossType.TOKEN_LEVEL
    kinds = {name: metric.kind for name, metric in loss_fn.sums(TokenOutputs(c), data).metrics.items()}
    assert kinds == {
        "loss": MetricKind.TOKENS,
        "num_unmasked_tokens": MetricKind.NONE,
        "num_valid_samples": MetricKind.NONE,
    }
    loss = loss_fn.sums(TokenOutputs(c.to("meta")), data.to("meta")).loss
    assert loss.device.type == "meta"
