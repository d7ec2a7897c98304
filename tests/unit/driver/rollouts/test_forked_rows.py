"""A template that drops earlier thoughts: rows fork, and each sampled token is trained once, as it was sampled."""

import random

import pytest
import torch
from chat_templates import APPENDING, EOS, REWRITING, byte_tokenizer

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import EPISODE, digests_of_rows
from nemo_rl_mcore.data.chat import make_observer, with_template
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.driver.rollouts.player import EpisodeForm, RolloutCollector
from nemo_rl_mcore.driver.rollouts.transcript import concatenate_batches, episode_metrics, require_sampled_ids
from nemo_rl_mcore.environment.turns import Reply, conversation

TURNS, NEW_TOKENS, SAMPLES = 4, 60, 3
THINKING_FIRST = APPENDING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


class Answering:
    """Draws answers, some with thoughts, some in ids that no text is encoded to; keeps what it was shown."""

    def __init__(self, tokenizer):
        self.tokenizer, self.shown = tokenizer, {}

    def generate(self, data, *, step, greedy=False):
        rows = zip(data["prompt_index"].tolist(), data["sample_index"].tolist(), strict=True)
        turn = int(data["turn_index"][0]) if "turn_index" in data else 0
        answers = []
        for row, (prompt, sample) in enumerate(rows):
            draws = random.Random(repr((prompt, sample, turn)))
            thought = "<think>\nhm é\n</think>\n\n" if draws.random() < 0.6 else ""
            ids = self.tokenizer.encode(f"{thought}answer {draws.randint(0, 99)}")
            ids = [one for token in ids for one in self._parts(token, draws)]
            answers.append(ids + self.tokenizer.encode(EOS))
            context = data["input_ids"][row, : data["input_lengths"][row]].tolist()
            self.shown[prompt, sample, turn + 1] = context, answers[-1]
        lengths = torch.tensor([*map(len, answers)])
        tokens = torch.zeros(len(answers), NEW_TOKENS, dtype=torch.long)
        for row, ids in enumerate(answers):
            tokens[row, : len(ids)] = torch.tensor(ids)
        return BatchedDataDict(
            tokens=tokens,
            logprobs=-torch.rand(tokens.shape),
            lengths=lengths,
            finished=torch.ones(len(answers), dtype=torch.bool),
            digests=digests_of_rows(tokens, lengths),
        )

    def _parts(self, token, draws):
        """A token, or the bytes that it stands for."""
        text = self.tokenizer.text_of([token])
        alone = [one for letter in text for one in self.tokenizer.encode(letter)]
        return alone if draws.random() < 0.3 and self.tokenizer.text_of(alone) == text else [token]


class Asking:
    """Replies until an episode has had some turns; an `Environments`."""

    def __init__(self):
        self.drop_reasons = {}

    def replies(self, turns):
        return [
            Reply(1.0)
            if len(turn.messages) >= 2 + 2 * (turn.prompt.index % TURNS)
            else Reply(0.25, terminated=False, observation=(Message("user", "and <|im_end|>?"),))
            for turn in turns
        ]


def played(tokenizer):
    prompts = [with_template(Prompt(i, f"question {i}", ""), tokenizer) for i in range(4)]
    engine = Answering(tokenizer)
    form = EpisodeForm(TURNS, 2000, NEW_TOKENS, make_observer(tokenizer, chat=True))
    collector = RolloutCollector(engine, tokenizer, 500, Asking(), form=form)
    return collector.collect(prompts, SAMPLES, step=3), engine


@pytest.mark.parametrize("template", [REWRITING, THINKING_FIRST], ids=["drops thoughts", "begins a thought"])
def test_each_sampled_token_is_trained_once_in_the_context_that_it_was_sampled_in(tmp_path, template):
    rollout, engine = played(byte_tokenizer(tmp_path, template))
    batch = rollout.batch
    require_sampled_ids(batch)
    trained = {}
    for row in range(batch.size):
        ids, turns = batch["input_ids"][row], batch["turn_of_token"][row]
        for turn in sorted(set(turns[turns > 0].tolist())):
            places = (turns == turn).nonzero().flatten()
            key = int(batch["prompt_index"][row]), int(batch["sample_index"][row]), turn
            assert key not in trained
            trained[key] = ids[: places[0]].tolist(), ids[places].tolist()
            assert batch["token_mask"][row][places].all()
            assert places.tolist() == [*range(int(places[0]), int(places[-1]) + 1)]
    assert trained == engine.shown
    assert batch.size > len(batch.samples()) == 4 * SAMPLES


@pytest.mark.parametrize("template", [REWRITING, THINKING_FIRST], ids=["drops thoughts", "begins a thought"])
def test_each_answer_is_drawn_behind_what_the_template_shows_of_the_conversation(tmp_path, template):
    """Behind texts, since sampled ids stand as they were sampled."""
    tokenizer = byte_tokenizer(tmp_path, template)
    _, engine = played(tokenizer)
    for prompt, sample in {key[:2] for key in engine.shown}:
        messages = [*conversation(with_template(Prompt(prompt, f"question {prompt}", ""), tokenizer))]
        for turn in range(1, 1 + len([key for key in engine.shown if key[:2] == (prompt, sample)])):
            context, answer = engine.shown[prompt, sample, turn]
            shown = tokenizer.render_chat(messages, add_generation_prompt=True)
            assert tokenizer.text_of(context) == shown
            messages += [Message("assistant", tokenizer.decode(answer)), Message("user", "and <|im_end|>?")]


def test_an_episode_of_several_rows_is_rewarded_and_counted_once(tmp_path):
    rollout, _ = played(byte_tokenizer(tmp_path, REWRITING))
    batch = rollout.batch
    for rows in batch.samples():
        turns = int(batch["turn_of_token"][rows.start : rows.stop].max())
        assert batch["rewards"][rows.start : rows.stop].tolist() == [1 + 0.25 * (turns - 1)] * len(rows)
    assert episode_metrics(batch)["episodes/turns_mean"] == 2.5
    assert episode_metrics(batch)["episodes/terminated_rate"] == 1.0
    assert len(rollout.prompts) == batch.size


def test_a_template_that_appends_keeps_one_row(tmp_path):
    rollout, _ = played(byte_tokenizer(tmp_path, APPENDING))
    assert EPISODE not in rollout.batch
    assert rollout.batch.size == 4 * SAMPLES


def test_groups_with_and_without_forks_stand_together(tmp_path):
    forked = played(byte_tokenizer(tmp_path / "forked", REWRITING))[0].batch
    whole = played(byte_tokenizer(tmp_path / "whole", APPENDING))[0].batch
    for parts in ([forked, whole, whole], [whole, forked]):
        joined = concatenate_batches(parts, 0)
        assert len(joined.samples()) == sum(len(part.samples()) for part in parts)
