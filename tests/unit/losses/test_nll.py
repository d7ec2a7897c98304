import pytest
import torch

from nemo_rl_mcore.config import NLLLossConfig
from nemo_rl_mcore.losses import NLLLossFn


def textbook(c, data):
    total, tokens = 0.0, 0
    for b, keep in enumerate(data["sample_mask"].tolist()):
        for t, on in enumerate(data["token_mask"][b, 1:].tolist()):
            if keep and on:
                total, tokens = total - c[b, t].item(), tokens + 1
    return total, tokens, data["sample_mask"].sum().item()


@pytest.mark.parametrize("cfg", [None, NLLLossConfig()])
def test_the_mean_over_valid_tokens_and_its_metrics(cfg, make_batch):
    c, data = make_batch()
    total, tokens, samples = textbook(c, data)
    loss, metrics = NLLLossFn(cfg)(c, data, 17, 23)
    assert loss.item() == pytest.approx(total / 23)
    assert metrics == pytest.approx(
        {"loss": total / 23, "num_unmasked_tokens": tokens, "num_valid_samples": samples}
    )
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    torch.testing.assert_close(torch.autograd.grad(loss, c)[0], -mask / 23)
