"""Dropped episodes: how many a run bears, and that they count in no mean."""

from types import SimpleNamespace

import pytest
import torch
from algorithm_fakes import TOKENIZER
from refusals import refused

from nemo_rl_mcore.config import ClippedPGLossConfig
from nemo_rl_mcore.config.algorithm import AdvantageEstimatorConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.turns import Ending, Reply
from nemo_rl_mcore.driver.algorithms.advantages import (
    GRPOAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
)
from nemo_rl_mcore.driver.algorithms.algorithm import rollout_metrics
from nemo_rl_mcore.driver.algorithms.dpo import best_against_worst
from nemo_rl_mcore.driver.rollouts.player import RolloutCollector
from nemo_rl_mcore.driver.rollouts.scheduler import EQUAL_REWARDS, Draw
from nemo_rl_mcore.driver.rollouts.transcript import (
    concatenate_batches,
    dropped_rows,
    episode_metrics,
)
from nemo_rl_mcore.environment.interface import LocalEnvironments
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.recipe.load import load_config


def batch_of(*dropped, **columns):
    endings = [Ending.DROPPED if one else Ending.TERMINATED for one in dropped]
    return BatchedDataDict(ending=torch.tensor(endings), **columns)


@pytest.mark.parametrize(
    ("dropped", "limit", "ends"),
    [(0, 0.0, False), (1, 0.0, True), (1, 0.25, False), (2, 0.25, True), (4, 1.0, False)],
)
def test_a_run_bears_as_many_as_it_is_told(dropped, limit, ends):
    batch = batch_of(*[True] * dropped, *[False] * (4 - dropped))
    environments = SimpleNamespace(drop_reasons={"it died": 1, "it hung": 3, "it raised": 2})
    player = RolloutCollector(None, None, 0, environments, max_drop_rate=limit)
    if not ends:
        player.check_drops(3, [batch])
        return
    message = (
        rf"step 3: {dropped} of 4 episodes \({dropped * 25}\.0%\) were dropped.*env\.pool\.max_drop_rate: {limit:g} is"
        r" the most; most often: it hung \(3 answers since the run began\)"
    )
    with pytest.raises(RunStoppedError, match=message):
        player.check_drops(3, [batch])


def test_a_batch_without_endings_has_dropped_none():
    assert dropped_rows(BatchedDataDict(rewards=torch.ones(2))).tolist() == [False, False]


def test_rewards_by_name_are_means_over_the_episodes_that_are_kept():
    batch = batch_of(True, False, False, **{"rewards/form": torch.tensor([0.0, 1.0, 2.0])})
    assert episode_metrics(batch) == {"rewards/form_mean": 1.5}
    assert episode_metrics(batch.slice(0, 1)) == {}


def test_a_group_of_which_all_were_dropped_joins_others_with_names():
    named = batch_of(
        False, input_ids=torch.ones(1, 2, dtype=torch.long), **{"rewards/form": torch.tensor([1.0])}
    )
    nameless = batch_of(True, input_ids=torch.ones(1, 3, dtype=torch.long))
    for parts, expected in (((named, nameless), [1.0, 0.0]), ((nameless, named), [0.0, 1.0])):
        assert concatenate_batches(parts, 0)["rewards/form"].tolist() == expected


class Answers:
    """Says "1" to each prompt."""

    def generate(self, data, *, step, greedy=False):
        tokens = torch.tensor([[*TOKENIZER.encode("1"), TOKENIZER.eos_token_id]]).repeat(data.size, 1)
        lengths, logprobs = torch.full((data.size,), 2), torch.zeros(data.size, 2)
        return BatchedDataDict(
            tokens=tokens, logprobs=logprobs, lengths=lengths, finished=torch.ones(data.size) > 0
        )


class DropsOdd(LocalEnvironments):
    """Gives no reply to every other prompt."""

    def __init__(self):
        super().__init__(None, drop_reasons={"it hung": 7})

    def replies(self, turns):
        return [Reply(0.0, dropped="it hung") if turn.prompt.index % 2 else Reply(1.0) for turn in turns]


@pytest.mark.parametrize("greedy", [False, True])
def test_the_collector_stops_the_run_above_the_rate(greedy):
    prompts = [Prompt(0, "0>", "0"), Prompt(1, "1>", "1")]
    bears = RolloutCollector(Answers(), TOKENIZER, 4, DropsOdd(), max_drop_rate=0.5)
    assert bears.collect(prompts, 2, step=1, greedy=greedy).batch["sample_mask"].tolist() == [1, 1, 0, 0]
    with refused("too-many-dropped", "step 1: ", "2 of 4", "it hung (7", by=RunStoppedError):
        RolloutCollector(Answers(), TOKENIZER, 4, DropsOdd()).collect(prompts, 2, step=1, greedy=greedy)


class Gives:
    """Scores the answers to a prompt in turn."""

    def __init__(self, *scores):
        self.scores = scores

    def score(self, prompts, responses, finished):
        return [self.scores[place % len(self.scores)] for place, _ in enumerate(prompts)]


def scored(*scores):
    """A rollout of two prompts whose answers have these rewards."""
    collector = RolloutCollector(Answers(), TOKENIZER, 4, LocalEnvironments(Gives(*scores)))
    return collector.collect([Prompt(0, "0>", "0"), Prompt(1, "1>", "1")], len(scores), step=1)


@pytest.mark.parametrize("loo", [True, False])
@pytest.mark.parametrize("estimator", [GRPOAdvantageEstimator, ReinforcePlusPlusAdvantageEstimator])
def test_an_answer_that_is_not_scored_is_nothing_to_the_others(estimator, loo):
    config = AdvantageEstimatorConfig(use_leave_one_out_baseline=loo)
    found = []
    for scores in ((1.0, None, 0.0, 0.5), (1.0, 0.0, 0.5)):
        rollout = scored(*scores)
        estimator(config, ClippedPGLossConfig()).add_to(rollout.batch)
        found.append((rollout.batch["advantages"][: len(scores), 0].tolist(), rollout_metrics(rollout)))
    (with_none, metrics), (without, others) = found
    assert with_none == [without[0], 0.0, *without[1:]]
    rollout = scored(1.0, None, 0.0, 0.5)
    assert rollout.batch["sample_mask"].tolist() == [1, 0, 1, 1] * 2
    assert dropped_rows(rollout.batch).any().item() is False
    assert metrics.pop("episodes/unscored_rate") == 0.25
    assert {**metrics, "train/total_num_tokens": 0} == {**others, "train/total_num_tokens": 0}


@pytest.mark.parametrize(
    ("scores", "signal"),
    [((1.0, None), False), ((None, None), False), ((None, 0.0, 1.0), True), ((None, 1.0, 1.0), False)],
)
def test_a_group_with_fewer_than_two_scores_teaches_nothing(scores, signal):
    rollout = scored(*scores)
    section = load_config("examples/configs/grpo_copy_cpu.yaml").grpo
    sampling = section.model_copy(update={"use_dynamic_sampling": True})
    unused = Draw(None, None, 1, len(scores), sampling).unused_for(rollout.batch.slice(0, len(scores)))
    assert unused == (None if signal else EQUAL_REWARDS)
    GRPOAdvantageEstimator(AdvantageEstimatorConfig(), ClippedPGLossConfig()).add_to(rollout.batch)
    assert bool(rollout.batch["advantages"].any()) is signal
    _, differing = best_against_worst(rollout, len(scores))
    assert differing == float(signal)
    assert rollout_metrics(rollout)["episodes/unscored_rate"] == pytest.approx(
        scores.count(None) / len(scores)
    )
