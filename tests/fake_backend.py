"""A backend of the train step without a model: it writes down what it was asked, and can fail at any call."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses.base import LossSums, LossType, MetricKind, MetricSum
from nemo_rl_mcore.rank.sums import LocalSums


class InjectedError(RuntimeError):
    def __init__(self, call):
        super().__init__(f"injected at {call}")


@dataclass(frozen=True)
class SumOfRewards:
    """A stand-in for a loss: only what the state machine reads."""

    loss_type: LossType = LossType.TOKEN_LEVEL
    rows_per_sample: int = 1


class FakeBackend:
    """Its gradient is the list of rewards added since the last zero_grad, its weights the rewards of each update.

    `fail_at` names a call that raises: before it did anything, or with `fail_late` after it did all.
    """

    def __init__(self):
        self.calls = []
        self.synchronised = True
        self.overlaps_grad_sync = False
        self.norm = 2.0
        self.fail_at = None
        self.fail_late = False
        self.gradient = []
        self.factors = []
        self.finalized = 0
        self.draws = 0
        self.updates = []
        self.samples = 0

    @contextmanager
    def _call(self, call):
        self.calls.append(call)
        if self.fail_at == call and not self.fail_late:
            raise InjectedError(call)
        yield
        if self.fail_at == call:
            raise InjectedError(call)

    def called_together(self, _call):
        return nullcontext()

    def done_together(self, _call):
        return nullcontext()

    def snapshot(self):
        with self._call("snapshot"):
            return self.draws

    def restore(self, snapshot):
        with self._call("restore"):
            self.draws = snapshot

    def zero_grad(self):
        with self._call("zero_grad"):
            self.gradient, self.factors, self.finalized = [], [], 0

    @contextmanager
    def deferred_grad_sync(self):
        with self._call("defer"):
            self.synchronised = False
            try:
                yield
            finally:
                self.synchronised = True

    def reduce_counts(self, data):
        with self._call("counts"):
            return LocalSums.of(None, data).reduce(lambda numbers: numbers[None])

    @contextmanager
    def overlapped_grad_sync(self, factor):
        with self._call("overlap"):
            self.factors.append(factor)
            yield True

    def forward_backward(self, data, loss_fn, micro_batch_size):
        with self._call("forward_backward"):
            assert not self.synchronised
            self.draws += 1
            self.gradient += data["rewards"].tolist()
            loss = MetricSum(data["rewards"].sum(), MetricKind.TOKENS)
            return LocalSums.of(LossSums(loss.value, {"loss": loss}), data)

    def reduce(self, sums):
        with self._call("reduce"):
            return sums.reduce(lambda numbers: numbers[None])

    def scale_gradients(self, factor):
        with self._call("scale"):
            assert not self.finalized, "gradients are divided before they are reduced"
            self.factors.append(factor)

    def finalize_gradients(self):
        with self._call("finalize"):
            assert self.synchronised, "gradients are finalised after the hold-back ended"
            self.finalized += 1

    def gradient_norm(self):
        with self._call("norm"):
            return self.norm

    def optimizer_step(self, increment):
        with self._call("optimizer"):
            assert (len(self.factors), self.finalized) == (1, 1), "divided once, reduced once"
            self.updates.append(self.gradient)
            self.samples += increment
            return True

    def learning_rate_and_weight_decay(self):
        with self._call("lr"):
            return 0.5, 0.25


def rows(rewards, tokens=3, valid=True):
    count = len(rewards)
    return BatchedDataDict(
        rewards=torch.tensor(rewards),
        token_mask=torch.ones(count, tokens),
        sample_mask=torch.full((count,), float(valid)),
    )
