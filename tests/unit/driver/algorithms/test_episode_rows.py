"""Rows of one episode are what its one row is: in advantages, metrics and runs; and dropped episodes are nothing."""

from dataclasses import dataclass, replace

import pytest
import torch
from algorithm_fakes import FakePolicy, collector, recipe
from algorithm_fakes import run as run_to_its_end
from parted_rows import as_rows
from refusals import refused

from nemo_rl_mcore.config import AdvantageEstimatorConfig, ClippedPGLossConfig, GenerationConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import digest_of_ids
from nemo_rl_mcore.driver.algorithms.advantages import make_advantage_estimator
from nemo_rl_mcore.driver.algorithms.algorithm import rollout_metrics
from nemo_rl_mcore.driver.algorithms.dpo import best_against_worst
from nemo_rl_mcore.driver.algorithms.mismatch import Mismatch, compare_with_engine, table_of_batch
from nemo_rl_mcore.driver.algorithms.ppo import shuffled
from nemo_rl_mcore.driver.rollouts.player import Rollout, RolloutCollector
from nemo_rl_mcore.driver.rollouts.scheduler import shape_rewards
from nemo_rl_mcore.driver.rollouts.transcript import require_sampled_ids
from nemo_rl_mcore.environment.interface import LocalEnvironments
from nemo_rl_mcore.environment.turns import Ending
from nemo_rl_mcore.errors import RunStoppedError

COLUMNS = 9
CUTS = [[4], [], [3, 5, 6], [7], [2, 4], []]


def one_row_each(dropped=()):
    """Two prompts with three episodes each, of one row; the fifth has no token to train on."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor([9, 6, 8, 9, 7, 5])
    columns = torch.arange(COLUMNS)
    sampled = (columns >= 2) & (columns < lengths.unsqueeze(1)) & (columns != 5)
    sampled[4] = False
    values, policy, reference, generation = torch.randn(4, 6, COLUMNS, generator=generator)
    rewards = torch.tensor([0.0, 1.0, 0.25, 0.5, 0.7, -1.0])
    endings = [Ending.DROPPED if row in dropped else Ending.TERMINATED for row in range(6)]
    return BatchedDataDict(
        input_ids=torch.randint(1, 30, (6, COLUMNS), generator=generator),
        input_lengths=lengths,
        token_mask=sampled.float(),
        sample_mask=torch.tensor([float(row not in dropped) for row in range(6)]),
        prompt_index=torch.tensor([7, 7, 7, 9, 9, 9]),
        sample_index=torch.tensor([0, 1, 2, 0, 1, 2]),
        rewards=rewards,
        finished=torch.tensor([True, False, True, True, False, False]),
        values=values,
        prev_logprobs=policy,
        generation_logprobs=policy + 0.3 * generation * sampled,
        reference_policy_logprobs=reference,
        turn_of_token=torch.where(sampled, 1 + (columns > 5), 0),
        ending=torch.tensor(endings),
    )


def whole_and_parts(dropped=()):
    whole = one_row_each(dropped)
    return whole, as_rows(whole, CUTS)


# --- as_rows ----------------------------------------------------------------------------------------------


def test_each_sampled_token_is_in_one_row_behind_all_that_came_before():
    whole, parts = whole_and_parts()
    assert parts["episode_index"].tolist() == [0, 0, 1, 2, 2, 2, 2, 3, 3, 4, 4, 4, 5]
    assert parts["input_lengths"].tolist() == [4, 9, 6, 3, 5, 6, 8, 7, 9, 2, 4, 7, 5]
    for number in range(6):
        rows = parts.select_indices((parts["episode_index"] == number).nonzero().flatten())
        assert torch.equal(rows["token_mask"].sum(0), whole["token_mask"][number])
        own = torch.arange(COLUMNS) < whole["input_lengths"][number]
        assert torch.equal(rows["generation_logprobs"].sum(0), whole["generation_logprobs"][number] * own)
        for length, ids in zip(rows["input_lengths"].tolist(), rows["input_ids"], strict=True):
            assert torch.equal(ids[:length], whole["input_ids"][number, :length])
        assert set(rows["prompt_index"].tolist()) == {int(whole["prompt_index"][number])}


# --- advantages -------------------------------------------------------------------------------------------

ESTIMATORS = {
    "grpo": {"name": "grpo"},
    "leave one out": {"name": "grpo", "use_leave_one_out_baseline": True},
    "not normalised": {"name": "grpo", "normalize_rewards": False},
    "reinforce_plus_plus": {"name": "reinforce_plus_plus"},
    "no baseline": {"name": "reinforce_plus_plus", "minus_baseline": False},
    "gae": {"name": "gae", "gae_lambda": 0.9, "gae_gamma": 0.98},
    "gae, whitened": {"name": "gae", "normalize_advantages": True},
    "gae by length": {"name": "gae", "length_adaptive_alpha": 0.3, "gae_lambda_value": 0.7},
}  # fmt: skip
KL_IN_REWARD = ClippedPGLossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.3)


def judged(name, batch):
    """The batch with its advantages and, of a critic, returns."""
    judged = BatchedDataDict(batch)
    make_advantage_estimator(AdvantageEstimatorConfig(**ESTIMATORS[name]), KL_IN_REWARD).add_to(judged)
    return judged


@pytest.mark.parametrize("dropped", [(), (1,)])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_token_has_the_advantage_that_it_has_in_one_row(name, dropped):
    whole, parts = (judged(name, batch) for batch in whole_and_parts(dropped))
    for key in ("advantages", "returns"):
        if key in whole:
            found = torch.zeros(6, COLUMNS).index_add(
                0, parts["episode_index"], parts[key] * parts["token_mask"]
            )
            assert torch.allclose(found, whole[key] * whole["token_mask"], rtol=0, atol=1e-6)
    assert float((whole["advantages"] * whole["token_mask"]).abs().max()) > 0.1


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_dropped_episode_is_nothing_to_the_others(name):
    with_it = judged(name, as_rows(one_row_each(dropped=(2, 3)), CUTS))
    kept = [row for row in range(with_it.size) if with_it["ending"][row] != Ending.DROPPED]
    without = judged(name, with_it.select_indices(kept))
    assert torch.equal(with_it["advantages"][kept], without["advantages"])
    others = [row for row in range(with_it.size) if row not in kept]
    assert others
    assert not with_it["advantages"][others].any()


# --- metrics, rewards, mismatch ---------------------------------------------------------------------------


def metrics_of(batch):
    return rollout_metrics(Rollout(judged("grpo", batch), [], []))


@pytest.mark.parametrize("dropped", [(), (0, 5)])
def test_metrics_count_an_episode_once(dropped):
    whole, parts = (metrics_of(batch) for batch in whole_and_parts(dropped))
    # Of several rows these speak of what stands in each of them.
    for of_rows in ("train/total_num_tokens", "episodes/observation_tokens_mean", "train/mean_prompt_length"):
        whole.pop(of_rows), parts.pop(of_rows)
    assert parts == pytest.approx(whole, abs=1e-6)


def test_metrics_leave_dropped_episodes_out():
    found, kept = metrics_of(one_row_each(dropped=(0, 5))), metrics_of(one_row_each().slice(1, 5))
    differing = {name for name in kept if found[name] != pytest.approx(kept[name], abs=1e-6)}
    assert differing == {"train/total_num_tokens", "episodes/dropped_rate", "episodes/terminated_rate"}
    assert found["episodes/dropped_rate"] == pytest.approx(2 / 6)


def test_the_length_that_is_penalised_is_that_of_the_episode():
    shaping = {"enabled": True, "overlong_buffer_length": 4, "max_response_length": 6}
    shaping |= {"overlong_buffer_penalty": 1.0}
    config = recipe("grpo", grpo={"reward_shaping": shaping, "overlong_filtering": True})
    whole, parts = (Rollout(batch, [], []) for batch in whole_and_parts(dropped=(2,)))
    shape_rewards(config.grpo, whole.batch)
    shape_rewards(config.grpo, parts.batch)
    kept = parts.batch["episode_index"] != 2
    for key in ("rewards", "sample_mask"):
        assert torch.equal(parts.batch[key][kept], whole.batch[key][parts.batch["episode_index"]][kept])
    assert not parts.batch["sample_mask"][~kept].any()
    assert not torch.equal(whole.batch["rewards"], whole.batch["environment_rewards"])


def test_training_and_generation_are_compared_by_episode():
    whole, parts = whole_and_parts(dropped=(1,))
    found, wanted = (Mismatch.of(batch, table_of_batch(batch)) for batch in (parts, whole))
    assert torch.allclose(found.per_sequence, wanted.per_sequence)
    assert len(found.per_sequence) == 5
    config = GenerationConfig(
        max_new_tokens=1, mismatch_threshold=float(wanted.per_sequence.median()), mismatch_action="mask"
    )
    assert found.metrics(config.mismatch_threshold) == pytest.approx(
        wanted.metrics(config.mismatch_threshold)
    )
    for batch in (parts, whole):
        compare_with_engine(5, batch, table_of_batch(batch), config)
    assert torch.equal(parts["sample_mask"], whole["sample_mask"][parts["episode_index"]])
    assert 0 < whole["sample_mask"].sum() < 5


def test_what_was_sampled_is_compared_over_all_rows():
    whole = one_row_each()
    whole["sampled_digests"] = torch.tensor(
        [
            [digest_of_ids(sampled.tolist()) if len(sampled := ids[turns == turn]) else 0 for turn in (1, 2)]
            for ids, turns in zip(whole["input_ids"], whole["turn_of_token"], strict=True)
        ]
    )
    parts = as_rows(whole, CUTS)
    require_sampled_ids(parts)
    parts["input_ids"][6, 6] += 1
    with refused("ids-differ", "prompt_index 7, sample_index 2: answer 2 ", by=RunStoppedError):
        require_sampled_ids(parts)


def test_pairs_are_not_made_of_dropped_answers_nor_of_several_rows():
    batch = one_row_each(dropped=(1, 3, 4))
    batch["rewards"] = torch.tensor([1.0, 0.0, 1.25, 0.0, 0.0, -1.0])
    pairs, with_signal = best_against_worst(Rollout(batch, [], []), 3)
    assert pairs["sample_index"].tolist()[:2] == [2, 0]
    assert pairs["sample_mask"].tolist() == [1, 1, 0, 0]
    assert with_signal == 0.5
    with refused("rows-per-episode", "episode_index"):
        best_against_worst(Rollout(as_rows(batch, CUTS), [], []), 3)


def test_an_epoch_shuffles_whole_episodes():
    whole, parts = whole_and_parts()
    order = shuffled(parts, seed=1, step=2, epoch=3)["episode_index"].tolist()
    rows = shuffled(whole, seed=1, step=2, epoch=3)
    place = 3 * (rows["prompt_index"] == 9) + rows["sample_index"]
    assert [*dict.fromkeys(order)] == place.tolist()
    assert order != sorted(order)


# --- runs -------------------------------------------------------------------------------------------------


class InRows(RolloutCollector):
    """Parts each answer from its prompt, and behind its first token."""

    def play_now(self, prompts, asked, *, step, greedy=False):
        batch = super().play_now(prompts, asked, step=step, greedy=greedy)
        first, lengths = batch["token_mask"].argmax(1), batch["input_lengths"]
        cuts = [
            [start, start + 1] if start + 1 < length else [start]
            for start, length in zip(first.tolist(), lengths.tolist(), strict=True)
        ]
        return as_rows(batch, cuts)


def run(algorithm, in_rows, keys):
    policy = FakePolicy()
    config = recipe(algorithm, **{algorithm: keys | {"val_at_start": True, "val_at_end": True}})
    plain = collector(config, policy)
    collects = InRows(plain.generation, plain.tokenizer, plain.max_prompt_length, plain.environments)
    return policy, run_to_its_end(config, policy, collector=collects if in_rows else plain).observer


@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [("grpo", {}), ("grpo", {"use_dynamic_sampling": True}), ("ppo", {"ppo_epochs": 2})],
)
def test_a_run_trains_the_tokens_of_its_episodes_whatever_rows_they_are_in(algorithm, keys):
    (plain, plain_notes), (policy, notes) = (run(algorithm, in_rows, keys) for in_rows in (False, True))
    assert len(plain.batches) == len(policy.batches)
    for batch, wanted in zip(policy.batches, plain.batches, strict=True):
        samples = batch.samples()
        assert batch.size > len(samples) == wanted.size == 12
        for sample, row in zip(samples, range(wanted.size), strict=True):
            rows = batch.select_indices(sample)
            for key in ("prompt_index", "sample_index", "rewards"):
                assert set(rows[key].tolist()) == {wanted[key][row].item()}
            mask = wanted["token_mask"][row]
            assert torch.equal(rows["token_mask"].sum(0), mask)
            found = (rows["advantages"] * rows["token_mask"]).sum(0)
            assert torch.allclose(found, wanted["advantages"][row] * mask, atol=1e-6)
    for step, wanted in plain_notes.steps.items():
        if step:
            assert notes.steps[step].pop("train/total_num_tokens") > wanted.pop("train/total_num_tokens")
        assert notes.steps[step] == pytest.approx(wanted, abs=1e-6)


def test_dynamic_sampling_keeps_groups_whole_with_their_dropped_episodes():
    """Each third answer is dropped; two that differ are a signal, and a dropped one is none."""

    def run_with(dropped_sample):
        policy, config = FakePolicy(), recipe("grpo", grpo={"use_dynamic_sampling": True})
        plain = collector(config, policy)
        environments = Dropping(plain.environments.environment, dropped=dropped_sample)
        lossy = replace(plain, environments=environments, max_drop_rate=0.5)
        notes = run_to_its_end(config, policy, collector=lossy).observer
        return policy.batches[0], notes

    batch, notes = run_with(2)
    assert batch.size == 12
    assert (batch["sample_mask"] == 0).equal(batch["sample_index"] == 2)
    assert not batch["advantages"][batch["sample_index"] == 2].any()
    assert notes.steps[1]["train/reward_max"] > notes.steps[1]["train/reward_min"]
    assert notes.steps[1]["env/dropped"] == 4
    # Without the one answer that is ever right in part, no group has a signal.
    with refused("too-few-groups", by=RunStoppedError):
        run_with(0)


@dataclass(frozen=True)
class Dropping(LocalEnvironments):
    """Environments whose replies to one answer of three are lost; the others earn half a point more."""

    dropped: int = 0

    def take_counts(self):
        return {"env/dropped": 4.0}

    def replies(self, turns):
        return [
            replace(reply, dropped="lost")
            if row % 3 == self.dropped
            else replace(reply, reward=reply.reward + 0.5)
            for row, reply in enumerate(super().replies(turns))
        ]
