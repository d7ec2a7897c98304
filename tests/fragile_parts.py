"""Environments that fail in their ways, named in recipes by `fragile_parts:Name`; what they give is the length."""

import os
import random
import time

from nemo_rl_mcore.environment.interface import EnvironmentReturn


class Length:
    def score(self, prompts, responses, finished):
        return [float(len(response)) for response in responses]


class Slow(Length):
    """Slower for some than for others, so that the last are ready first."""

    def __init__(self, seconds=0.02):
        self.seconds = seconds

    def score(self, prompts, responses, finished):
        time.sleep(self.seconds * (1 + prompts[0].index % 3))
        return super().score(prompts, responses, finished)


def fail(how):
    match how:
        case "raise":
            raise KeyError("no such row")
        case "exit":
            os._exit(1)
        case "hang":
            time.sleep(600)


class Fragile(Length):
    """Fails in a share of its calls, in one of three ways."""

    def __init__(self, share):
        self.share, self.random = share, random.Random(os.getpid())

    def score(self, prompts, responses, finished):
        if self.random.random() < self.share:
            fail(self.random.choice(["raise", "exit", "hang"]))
        return super().score(prompts, responses, finished)


class Bad(Length):
    def __init__(self, how, index):
        self.how, self.index = how, index

    def score(self, prompts, responses, finished):
        if self.index in [prompt.index for prompt in prompts]:
            fail(self.how)
            return []
        return super().score(prompts, responses, finished)


class OneScore:
    """Gives one score, however many answers there are; of a single one that is right."""

    def score(self, prompts, responses, finished):
        return [0.5]


class RaisesOnce(Length):
    """Raises at first, as a service does that is away; gives how many answers it was shown at once."""

    raised = False

    def score(self, prompts, responses, finished):
        if not self.raised:
            self.raised = True
            raise ConnectionError("away")
        return [float(len(responses))] * len(responses)


class TwoRewards:
    def step(self, message_log_batch, metadata):
        logs = len(message_log_batch)
        values = [float(len(log[-1]["content"])) for log in message_log_batch]
        rewards = {"value": values, "form": [1.0] * logs}
        return EnvironmentReturn([None] * logs, [None] * logs, [None] * logs, rewards, [True] * logs)


class NeedsKey:
    def __init__(self):
        self.key = os.environ.get("WORKERS_TEST_TOKEN", "")

    def score(self, prompts, responses, finished):
        return [float(len(self.key))] * len(responses)


class AlwaysNew:
    def score(self, prompts, responses, finished):
        raise ValueError(f"not {prompts[0].index}")
