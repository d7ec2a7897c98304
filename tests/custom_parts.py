"""Classes as a user writes them, named in recipes by `custom_parts:Name`."""

import torch

from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.environment.interface import EnvironmentReturn
from nemo_rl_mcore.losses import (
    ClippedPGLossFn,
    LossFunction,
    LossInputType,
    LossSums,
    LossType,
    MetricKind,
    MetricSum,
    NLLLossFn,
    TokenLossFunction,
)
from nemo_rl_mcore.losses.base import Masks


class ScaledNLL(NLLLossFn):
    def __init__(self, cfg, use_fused_linear_logprobs=False, *, scale):
        super().__init__(cfg, use_fused_linear_logprobs)
        self.scale = scale

    def sums(self, outputs, data):
        whole = super().sums(outputs, data)
        return LossSums(whole.loss * self.scale, whole.metrics)


class CountedPG(ClippedPGLossFn):
    def __init__(self, cfg, use_fused_linear_logprobs=False, *, weight):
        super().__init__(cfg, use_fused_linear_logprobs)
        self.weight = weight

    def sums(self, outputs, data):
        whole = super().sums(outputs, data)
        weight = self.weight * Masks.of(data).valid.sum()
        return LossSums(whole.loss, whole.metrics | {"own_weight": MetricSum(weight, MetricKind.TOKENS)})


class FromScratch(TokenLossFunction):
    loss_type = LossType.TOKEN_LEVEL

    def __init__(self, cfg, use_fused_linear_logprobs=False):
        self.cfg = cfg
        self.use_fused_linear_logprobs = use_fused_linear_logprobs

    def sums(self, outputs, data):
        loss = outputs.logprobs.sum()
        return LossSums(loss, {"loss": MetricSum(loss.detach(), MetricKind.TOKENS)})


class Leaving(FromScratch):
    def sums(self, outputs, data):
        raise SystemExit("a loss that leaves")


class OfPairs(FromScratch):
    rows_per_sample = 2


class Unfinished(FromScratch):
    sums = TokenLossFunction.sums


class OfValues(LossFunction):
    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.VALUE

    def __init__(self, cfg, use_fused_linear_logprobs=False):
        pass

    def sums(self, outputs, data):
        raise NotImplementedError


class OfNoType(TokenLossFunction):
    def __init__(self, cfg, use_fused_linear_logprobs=False):
        pass

    def sums(self, outputs, data):
        raise NotImplementedError


class Stranger:
    def __init__(self, cfg, use_fused_linear_logprobs=False):
        pass

    def sums(self, outputs, data):
        return torch.zeros(())


class LengthReward:
    def __init__(self, wanted=2):
        self.wanted = wanted

    def score(self, prompts, responses, finished):
        return [float(len(response) == self.wanted) for response in responses]


class BadReward:
    def __init__(self, scores):
        self.scores = scores

    def score(self, prompts, responses, finished):
        return self.scores


class OneScore:
    def score(self, prompts, responses, finished):
        return [1.0]


class Steps:
    """Says `returned` to each answer."""

    def __init__(self, returned=None):
        self.returned = returned

    def step(self, message_log_batch, metadata):
        if self.returned is not None:
            return self.returned
        logs = len(message_log_batch)
        rewards = {"length": [float(len(log[-1]["content"])) for log in message_log_batch]}
        return EnvironmentReturn([None] * logs, [*metadata], [None] * logs, rewards, [True] * logs)


class RaisingSteps:
    def step(self, message_log_batch, metadata):
        raise KeyError("no such tool")


class Neither:
    pass


class Counting:
    def __init__(self, seed, start=0):
        self.first = 1000 * seed + start

    def train_batch(self, step, count):
        return [Prompt(self.first + index, f"{index}>", str(index)) for index in range(count)]

    def validation(self, count):
        return [Prompt(0, "0>", "0")] * count


NOT_A_CLASS = "text"


def right(responses, answers):
    return [float(response == answer) for response, answer in zip(responses, answers, strict=True)]


def near(responses, target):
    pairs = zip(responses, target, strict=True)
    return [sum(a == b for a, b in zip(response, one, strict=False)) / 3 for response, one in pairs]


async def awaited(prompts, **columns):
    return [float(len(columns.get("target", prompts)[place])) for place, _ in enumerate(prompts)]


def by_place(responses, /):
    return [0.0 for _ in responses]


class MeanAdvantage:
    def __init__(self, cfg, loss_cfg, factor=1.0):
        self.factor = factor

    def compute_advantage(self, prompt_ids, rewards, mask, **logprobs):
        return self.factor * (rewards - rewards.mean())[:, None].expand(mask.shape).clone()


class ShortAdvantage(MeanAdvantage):
    def compute_advantage(self, prompt_ids, rewards, mask, **logprobs):
        return rewards


class EndlessAdvantage(MeanAdvantage):
    def compute_advantage(self, prompt_ids, rewards, mask, **logprobs):
        return torch.full(mask.shape, float("inf"))


class CriticAdvantage:
    def __init__(self, cfg, loss_cfg):
        pass

    def compute_advantage(self, prompt_ids, rewards, mask, *, values, logprobs=None, reference_logprobs=None):
        advantages = (rewards[:, None] - values) * mask
        return advantages, advantages + values
