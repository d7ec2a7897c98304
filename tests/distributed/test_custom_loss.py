"""A loss of the user's own that raises on the ranks, in words that name its key and the user's line."""

import pytest
import tiny
import worker_state

from nemo_rl_mcore.config import ClippedPGLossConfig
from nemo_rl_mcore.losses import make_loss


def raised_by_a_loss(layout):
    """What `train` raises, and whether the worker trains as if nothing had been."""
    worker = tiny.worker(tiny.policy_config(megatron=layout))
    before = worker_state.capture(worker)
    with pytest.raises(ValueError, match="custom_parts") as caught:
        worker.train(tiny.grpo_batch(), make_loss(ClippedPGLossConfig(type="custom_parts:Leaving")))
    worker.abort_train_step()
    return str(caught.value), worker_state.differences(before, worker_state.capture(worker))


def test_it_is_named_by_its_key_and_its_line(ranks):
    [(text, differences)] = ranks(1).run(raised_by_a_loss, {})
    first, *shown = text.splitlines()
    assert first.startswith("loss_fn.type: custom_parts:Leaving.sums raised SystemExit: a loss that leaves (")
    assert first.rpartition(":")[0].endswith("custom_parts.py")
    assert shown[-1] == "SystemExit: a loss that leaves"
    assert differences == []
