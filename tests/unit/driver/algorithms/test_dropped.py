"""Dropped episodes: how many a run bears, and that they count in no mean."""

import random
from contextlib import nullcontext

import pytest
import torch
from algorithm_fakes import TOKENIZER, select
from refusals import refused

from nemo_rl_mcore.config import ClippedPGLossConfig
from nemo_rl_mcore.config.algorithm import AdvantageEstimatorConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import digest_of_ids, digests_of_rows
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.driver.algorithms.advantages import (
    GRPOAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
)
from nemo_rl_mcore.driver.algorithms.algorithm import rollout_metrics
from nemo_rl_mcore.driver.algorithms.dpo import best_against_worst
from nemo_rl_mcore.driver.rollouts.player import Rollout, RolloutCollector
from nemo_rl_mcore.driver.rollouts.saved import load_groups, save_groups
from nemo_rl_mcore.driver.rollouts.scheduler import EQUAL_REWARDS, Draw
from nemo_rl_mcore.driver.rollouts.transcript import (
    concatenate_batches,
    dropped_rows,
    episode_metrics,
    require_sampled_ids,
)
from nemo_rl_mcore.environment.interface import LocalEnvironments
from nemo_rl_mcore.environment.turns import Ending, Reply
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.recipe.load import load_config


def batch_of(*dropped, **columns):
    endings = [Ending.DROPPED if one else Ending.TERMINATED for one in dropped]
    return BatchedDataDict(ending=torch.tensor(endings), **columns)


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
        super().__init__(None, drop_reasons={"it died": 1, "it hung": 7, "it raised": 9})

    def replies(self, turns):
        said = iter(("it died", "it hung"))
        return [Reply(0.0, dropped=next(said)) if turn.prompt.index % 2 else Reply(1.0) for turn in turns]


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(("limit", "ends"), [(0.0, True), (0.25, True), (0.5, False), (1.0, False)])
def test_the_collector_stops_the_run_above_the_rate(greedy, limit, ends):
    prompts = [Prompt(0, "0>", "0"), Prompt(1, "1>", "1")]
    player = RolloutCollector(Answers(), TOKENIZER, 4, DropsOdd(), max_drop_rate=limit)
    stops = refused("too-many-dropped", "step 3: ", "2 of 4", "it hung (7", by=RunStoppedError)
    with stops if ends else nullcontext():
        batch = player.collect(prompts, 2, step=3, greedy=greedy).batch
        assert batch["sample_mask"].tolist() == [1, 1, 0, 0]


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


TURNS, TOKENS = 3, 40
PROMPT = 3


def played(rows=6, seed=0, turns=TURNS, tokens=TOKENS):
    """Episodes of random ids: a prompt, then answers and observations of random lengths."""
    draws = random.Random(seed)
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    turn_of_token = torch.zeros_like(ids)
    digests = torch.zeros(rows, turns, dtype=torch.long)
    for row in range(rows):
        at = PROMPT
        ids[row, :at] = 9
        for turn in range(1, draws.randint(1, turns) + 1):
            answer = [draws.randrange(32) for _ in range(draws.randint(1, 5))]
            ids[row, at : at + len(answer)] = torch.tensor(answer)
            turn_of_token[row, at : at + len(answer)] = turn
            digests[row, turn - 1] = digest_of_ids(answer)
            at += len(answer)
            observed = draws.randint(0, 4)
            ids[row, at : at + observed] = 8
            at += observed
    batch = BatchedDataDict(
        input_ids=ids,
        input_lengths=torch.full((rows,), tokens),
        token_mask=(turn_of_token > 0).float(),
        prompt_index=torch.arange(rows) // 2,
        sample_index=torch.arange(rows) % 2,
        sampled_digests=digests,
    )
    return BatchedDataDict(batch, turn_of_token=turn_of_token) if turns > 1 else batch


def test_a_digest_is_of_the_ids_their_order_and_their_number():
    rows = [[1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3, 0], [258, 3]]
    assert len({digest_of_ids(row) for row in rows}) == 5
    assert digest_of_ids([1, 2, 3]) == digest_of_ids([1, 2, 3])
    assert digest_of_ids([1, 2, 3]) == -5405627362230748553
    together = digests_of_rows(torch.tensor([[1, 2, 3], [3, 2, 1]]), torch.tensor([3, 2]))
    assert together.tolist() == [digest_of_ids([1, 2, 3]), digest_of_ids([3, 2])]


@pytest.mark.parametrize("turns", [1, TURNS])
def test_ids_as_they_were_sampled_pass_also_in_another_order_or_padded(turns, tmp_path):
    batch = played(turns=turns)
    require_sampled_ids(batch)
    rollout = Rollout(batch, [Prompt(i, "", "") for i in range(6)], [""] * 6)
    require_sampled_ids(select(rollout, [5, 0, 3]).batch)
    other = played(seed=1, turns=turns, tokens=50)
    require_sampled_ids(concatenate_batches([batch, other, batch], 7))
    save_groups(tmp_path, {3: batch})
    loaded = load_groups(tmp_path)[3]
    require_sampled_ids(loaded)
    assert torch.equal(loaded["sampled_digests"], batch["sampled_digests"])


def place_of(batch, row, turn):
    return int((batch["turn_of_token"][row] == turn).nonzero()[0])


@pytest.mark.parametrize("change", ["id", "mask", "turn", "observation", "digest", "one more turn"])
def test_anything_else_names_the_answer(change):
    batch = played(rows=40)
    row = next(
        row for row in range(40) if batch["sampled_digests"][row, 1] and not batch["sampled_digests"][row, 2]
    )
    place = place_of(batch, row, 2)
    what = "answer 2"
    match change:
        case "id":
            batch["input_ids"][row, place] += 1
        case "mask":
            batch["token_mask"][row, place] = 0
        case "turn":
            batch["turn_of_token"][row, place] = 3
        case "observation":
            batch["token_mask"][row, PROMPT - 1], what = 1, "an observation"
        case "digest":
            batch["sampled_digests"][row, 1] = 0
        case "one more turn":
            batch["token_mask"][row, -1], batch["turn_of_token"][row, -1], what = 1, 4, "answer 4"
    name = f"prompt_index {row // 2}, sample_index {row % 2}: {what} "
    with refused("ids-differ", name, by=RunStoppedError):
        require_sampled_ids(batch)


def test_a_turn_that_was_sampled_and_is_not_trained_on_is_found():
    batch = played(turns=1)
    batch["token_mask"][2] = 0
    with refused("ids-differ", "prompt_index 1, sample_index 0: answer 1", by=RunStoppedError):
        require_sampled_ids(batch)


def test_an_engine_that_gives_no_digests_is_not_compared():
    batch = played()
    del batch["sampled_digests"]
    batch["input_ids"] += 1
    require_sampled_ids(batch)
