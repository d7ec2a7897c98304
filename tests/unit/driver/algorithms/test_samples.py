"""What is written of answers: what became of each, what was said in several turns, and of some every token."""

import math

import pytest
import torch
from algorithm_fakes import TOKENIZER, FakePolicy, recipe, run, select, train_result, trainer
from parted_rows import as_rows
from test_episodes import PROMPTS, SCRIPT, collect, until
from test_episodes import collector as several_turns

from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.driver.algorithms.algorithm import samples_of
from nemo_rl_mcore.driver.rollouts.scheduler import Step
from nemo_rl_mcore.driver.rollouts.start import draw_of
from nemo_rl_mcore.environment.turns import Reply

ALL = {"answers_with_tokens": 99}
NUMBERS = ("generation_logprobs", "prev_logprobs", "advantages")


def lengths_of(table):
    return {len(column) for column in table.values() if column is not None}


def columns_of(notes):
    """Which columns the tables have, of those that need not be there."""
    tables = [
        sample.tokens for sample in notes.sampled if sample.tokens is not None and not sample.of_validation
    ]
    assert tables
    assert all(len(lengths_of(table)) == 1 for table in tables)
    (found,) = {tuple(name for name in ("mask", *NUMBERS) if table[name] is not None) for table in tables}
    return found


# --- tokens -----------------------------------------------------------------------------------------------


def test_a_table_has_each_token_from_the_first_sampled_one_to_the_end_of_the_row():
    rollout, _ = collect(["527$", "52", "$"], [Prompt(4, "527>", "527")], 3)
    batch = rollout.batch
    batch["prev_logprobs"] = batch["generation_logprobs"] - 0.123456
    batch["advantages"] = torch.arange(8.0).expand(3, 8).clone()
    batch["advantages"][0, 5] = math.nan
    batch["sample_mask"] = torch.tensor([1.0, 0.0, 1.0])
    whole, cut, none = samples_of(rollout, 6, TOKENIZER, tables=2)
    assert none.tokens is None
    assert whole.tokens == {
        "text": ["5", "2", "7", "$"],
        "turn": [1, 1, 1, 1],
        "mask": [1, 1, 1, 1],
        "generation_logprobs": [-1.0, -1.1, -1.2, -1.3],
        "prev_logprobs": [-1.1235, -1.2235, -1.3235, -1.4235],
        "advantages": [4.0, None, 6.0, 7.0],
    }
    assert cut.tokens is not None
    assert (cut.tokens["text"], cut.tokens["mask"]) == (["5", "2"], [0, 0])


def test_an_answer_without_tokens_has_an_empty_table():
    rollout, _ = collect(["", "1$"], [Prompt(4, "527>", "527")], 2)
    empty, _ = samples_of(rollout, 6, TOKENIZER, tables=2)
    assert empty.response == ""
    assert empty.tokens is not None
    assert lengths_of(empty.tokens) == {0}
    assert samples_of(select(rollout, []), 6, TOKENIZER, tables=2) == []


def test_a_number_that_rounds_to_nothing_has_no_sign_and_infinity_is_none():
    rollout, _ = collect(["12$"], [Prompt(4, "527>", "527")], 1)
    rollout.batch["prev_logprobs"] = torch.full((1, 7), -1e-6).index_fill(1, torch.tensor([6]), -math.inf)
    (sample,) = samples_of(rollout, 6, TOKENIZER, tables=1)
    assert sample.tokens is not None
    assert str(sample.tokens["prev_logprobs"]) == "[0.0, 0.0, None]"


# --- turns ------------------------------------------------------------------------------------------------


def test_turns_are_the_answers_and_what_the_model_was_shown_between_them():
    played = several_turns(SCRIPT, until("9")).collect(PROMPTS, 2, step=5)
    longest, right, wrong, cut = samples_of(played, 5, TOKENIZER, tables=1)
    assert longest.turns == [
        {"role": "assistant", "content": "56", "reward": 0.25},
        {"role": "user", "content": "65>"},
        {"role": "assistant", "content": "78", "reward": 0.25},
        {"role": "user", "content": "87>"},
        {"role": "assistant", "content": "9", "reward": 1.0},
    ]
    assert right.turns == [{"role": "assistant", "content": "9", "reward": 1.0}]
    assert wrong.turns is not None
    assert [turn["content"] for turn in wrong.turns] == ["0", "0>", "9"]
    assert cut.turns == [{"role": "assistant", "content": "1", "reward": 0.25}], "nothing was said to it"
    assert longest.tokens is not None
    assert longest.tokens["text"] == [*"56$65>78$87>9$"]
    assert longest.tokens["turn"] == [1, 1, 1, 0, 0, 0, 2, 2, 2, 0, 0, 0, 3, 3]
    assert longest.tokens["mask"] == [int(turn > 0) for turn in longest.tokens["turn"]]
    numbers = longest.tokens["generation_logprobs"]
    assert [number is None for number in numbers] == [turn == 0 for turn in longest.tokens["turn"]]


def test_an_answer_of_several_turns_may_be_empty_and_the_last_may_have_no_reply():
    def reply(turn):
        if turn.prompt.index == 8:
            return Reply(0.0, dropped="it died")
        observed = (Message("tool", "7"), Message("user", "8"))
        return Reply(0.5, terminated=len(turn.messages) > 2, observation=observed)

    script = {(4, 0): ["$", "2$"], (8, 0): ["3$"]}
    played = several_turns(script, reply).collect(PROMPTS, 1, step=5)
    kept, dropped = samples_of(played, 5, TOKENIZER, tables=2)
    assert kept.turns == [
        {"role": "assistant", "content": "", "reward": 0.5},
        {"role": "tool", "content": "7"},
        {"role": "user", "content": "8"},
        {"role": "assistant", "content": "2", "reward": 0.5},
    ]
    assert dropped.turns == [{"role": "assistant", "content": "3"}], "what was not replied to has no reward"
    assert dropped.tokens is not None
    assert dropped.tokens["mask"] == [0, 0]


def test_each_row_of_an_episode_has_its_own_turns_and_tokens():
    player = several_turns(SCRIPT, until("9"))
    batch = player.collect(PROMPTS[:1], 2, step=5).batch
    # Before its first token, behind the first observation, and inside the second answer.
    rows = player.as_rollout(PROMPTS[:1], as_rows(batch, [[3, 9, 10], []]))
    prompt, first, begun, rest, other = samples_of(rows, 5, TOKENIZER, tables=5)
    assert (prompt.turns, lengths_of(prompt.tokens)) == ([], {0})
    assert first.turns == [{"role": "assistant", "content": "56", "reward": 0.25}]
    assert first.tokens["text"] == [*"56$65>"]
    assert begun.turns == [{"role": "assistant", "content": "7", "reward": 0.25}]
    assert (begun.tokens["text"], begun.tokens["turn"]) == (["7"], [2])
    assert rest.turns == [
        {"role": "assistant", "content": "8", "reward": 0.25},
        {"role": "user", "content": "87>"},
        {"role": "assistant", "content": "9", "reward": 1.0},
    ]
    assert rest.tokens["text"] == [*"8$87>9$"]
    assert other.turns == [{"role": "assistant", "content": "9", "reward": 1.0}]


# --- runs -------------------------------------------------------------------------------------------------


ONLINE = {"num_generations_per_prompt": 2}
GRADIENT = {"rl_weight": 0.5, "rl": {"reference_policy_kl_penalty": 0.0}}


@pytest.mark.parametrize(("recompute", "columns"), [("auto", NUMBERS[::2]), ("always", NUMBERS)])
def test_grpo_has_no_log_probabilities_where_only_the_ranks_have_seen_them(recompute, columns):
    one_step = {"train_global_batch_size": 12, "recompute_prev_logprobs": recompute}
    assert columns_of(run(recipe("grpo", one_step)).observer) == ("mask", *columns)


def test_ppo_has_an_advantage_of_each_token():
    notes = run(recipe("ppo", ppo={"num_prompts_per_step": 12}, logger=ALL)).observer
    assert columns_of(notes) == ("mask", *NUMBERS)
    longest = max((sample.tokens["advantages"] for sample in notes.sampled), key=len)
    assert len({*longest}) == len(longest) == 3


def test_online_dpo_masks_what_is_in_no_pair_that_counts():
    notes = run(recipe("dpo", {"train_global_batch_size": 12}, dpo=ONLINE, logger=ALL)).observer
    assert columns_of(notes) == ("mask", "generation_logprobs")
    trained = [sample for sample in notes.sampled if sample.tokens and not sample.of_validation]
    assert {sample.sample_mask for sample in trained} == {0.0, 1.0}
    assert all(set(sample.tokens["mask"]) == {int(sample.sample_mask)} for sample in trained)


@pytest.mark.parametrize(("loss_fn", "columns"), [({}, NUMBERS[:1]), (GRADIENT, NUMBERS)])
def test_on_policy_distillation_has_what_its_policy_gradient_has(loss_fn, columns):
    assert columns_of(run(recipe("distillation", loss_fn=loss_fn)).observer) == ("mask", *columns)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "dpo", "distillation"])
def test_a_validation_has_tables_of_its_own_that_are_not_trained_on(algorithm):
    loop = {"max_num_steps": 3, "val_period": 2, "val_at_end": True}
    loop |= {"max_val_samples": 9, "val_batch_size": 4}
    loop |= ONLINE if algorithm == "dpo" else {}
    notes = run(recipe(algorithm, **{algorithm: loop})).observer
    for step in (2, 3):
        of_step = [sample for sample in notes.sampled if sample.step == step]
        validated = [sample.tokens for sample in of_step if sample.of_validation]
        assert [table is not None for table in validated] == [True] * 8 + [False]
        assert all(table["mask"] is None for table in validated[:8])
        assert all(table["prev_logprobs"] is None and table["advantages"] is None for table in validated[:8])
        trained = [sample.tokens is not None for sample in of_step if not sample.of_validation]
        assert trained == [row < 8 for row in range(len(trained))]


@pytest.mark.parametrize(("answers", "tables"), [(2, 2), (0, 0), (None, 0)])
def test_the_recipe_says_of_how_many_answers(answers, tables):
    notes = run(recipe("grpo", logger={"answers_with_tokens": answers})).observer
    of_step = [sample.tokens for sample in notes.sampled if sample.step == 1]
    assert [table is not None for table in of_step] == [row < tables for row in range(12)]


ONE_STEP = {"train_global_batch_size": 12, "recompute_prev_logprobs": "always"}


class Ranks(FakePolicy):
    def begin_train_step(self, loss_fn, *, step_id=None):
        self.calls.append("begin")

    def train_microbatch(self, data, *, chunk_id=None):
        self.calls.append("chunk")

    def finish_train_step(self):
        self.calls.append("finish")
        return train_result()


def in_chunks(config, chunks):
    """A GRPO whose step's groups are there already, in chunks; every other one was drawn by weights of version 1."""
    policy = Ranks()
    algorithm = trainer(config, policy)
    draw = draw_of(config, algorithm.prompts, algorithm.collector)
    drawn = draw.groups_of(1)
    answered = draw.play_now(drawn)
    for position, group in enumerate(answered):
        group["weight_versions"] = torch.where(group["token_mask"] != 0, position % 2, -1)
    step = Step(1, draw, [[[of[place] for place in chunk] for of in (drawn, answered)] for chunk in chunks])
    policy.calls.clear()
    judged = algorithm.judge(step)
    policy.calls.append("update")
    algorithm.update(step, judged)
    return policy.calls, algorithm.observer


def test_a_streamed_step_tells_of_the_whole_step_once():
    streams = {"enabled": True, "min_groups_for_streaming_train": 2}
    loss = {"reference_policy_kl_penalty": 0.0, "use_importance_sampling_correction": False}
    colocated = {"generation": {"max_new_tokens": 3, "colocated": {"enabled": False}}}
    config = recipe("grpo", ONE_STEP | colocated, grpo={"async_grpo": streams}, loss_fn=loss)
    calls, notes = in_chunks(config, [[0, 1], [2, 3]])
    assert calls == ["begin", "logprobs", "chunk", "logprobs", "chunk", "update", "finish"]
    assert [sample.tokens is not None for sample in notes.sampled] == [True] * 8 + [False] * 4
    assert columns_of(notes) == ("mask", *NUMBERS)
    assert {sample.weight_version_max for sample in notes.sampled} == {0, 1}


def test_several_optimizer_steps_are_taken_over_the_whole_step():
    calls, _ = in_chunks(recipe("grpo", {"train_global_batch_size": 6}), [[0, 1], [2, 3]])
    assert calls == ["logprobs", "update", "train"]


# --- what became of an answer -----------------------------------------------------------------------------


def test_a_sample_tells_advantages_by_token_and_the_versions_that_drew_it():
    rollout, _ = collect(["527$", "52", "$"], [Prompt(4, "527>", "527")], 3)
    batch = rollout.batch
    columns = torch.arange(8.0).expand(3, 8)
    batch["advantages"] = columns
    none = [-1] * 4
    batch["weight_versions"] = torch.tensor(
        [[*none, 3, 3, 4, 4], [*none, 4, 4, -1, -1], [*none, 2, -1, -1, -1]]
    )
    long, cut, empty = samples_of(rollout, 6, TOKENIZER)
    advantages = [(sample.advantage_first, sample.advantage) for sample in (long, cut, empty)]
    assert advantages == [(4, 5.5), (4, 4.5), (4, 4)]
    versions = [(sample.weight_version_min, sample.weight_version_max) for sample in (long, cut, empty)]
    assert versions == [(3, 4), (4, 4), (2, 2)]
    found = cut.response, cut.answer, cut.truncated, cut.response_tokens, cut.reward
    assert found == ("52", "527", True, 2, 0.5)
    assert (empty.response, empty.sample_index, empty.truncated) == ("", 2, False)


def test_a_validation_has_the_version_of_its_step_and_trains_nothing():
    rollout, _ = collect(["1$"], [Prompt(1, "1>", "1")], 1)
    (validated,) = samples_of(rollout, 6, TOKENIZER, of_validation=True)
    (trained,) = samples_of(rollout, 6, TOKENIZER)
    assert (validated.weight_version_max, validated.sample_mask, validated.of_validation) == (6, None, True)
    assert (trained.weight_version_max, trained.sample_mask, trained.of_validation) == (5, 1.0, False)
