import asyncio
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_fakes import select
from refusals import refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.chat import make_observer
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.driver.algorithms.algorithm import samples_of
from nemo_rl_mcore.driver.rollouts.player import ONE_ANSWER, EpisodeForm, Episodes, Rollout, RolloutCollector
from nemo_rl_mcore.driver.rollouts.transcript import episode_metrics, trained_columns
from nemo_rl_mcore.environment.games import ArithmeticEnvironment
from nemo_rl_mcore.environment.interface import LocalEnvironments
from nemo_rl_mcore.environment.turns import Ending, Reply
from nemo_rl_mcore.errors import RunStoppedError

TOKENIZER = load_tokenizer("char")
PROMPTS = [Prompt(4, "12>", "12"), Prompt(8, "3>", "3")]


def ids_of(text):
    """Of a text in which $ ends an answer."""
    eos = TOKENIZER.eos_token_id
    return [token for part in text for token in ([eos] if part == "$" else TOKENIZER.encode(part))]


class Scripted:
    """Answers the row (prompt, sample) in turn t with script[prompt, sample][t]; versions are those of the turn."""

    def __init__(self, script, versions=False):
        self.script, self.versions, self.asked = script, versions, []

    def generate(self, data, *, step, greedy=False):
        self.step = step
        self.asked.append(data)
        turn = int(data["turn_index"][0]) if "turn_index" in data else 0
        keys = zip(data["prompt_index"].tolist(), data["sample_index"].tolist(), strict=True)
        texts = [self.script[key][turn] for key in keys]
        tokens = torch.zeros(len(texts), 6, dtype=torch.long)
        logprobs = torch.zeros(len(texts), 6)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(ids_of(text))
            logprobs[row, : len(text)] = -(turn + 1) - torch.arange(len(text)) / 10
        answered = BatchedDataDict(
            tokens=tokens,
            logprobs=logprobs,
            lengths=torch.tensor([len(text) for text in texts]),
            finished=torch.tensor([text.endswith("$") for text in texts]),
        )
        if self.versions:
            places = torch.arange(6).expand(len(texts), 6) < answered["lengths"].unsqueeze(1)
            answered["weight_versions"] = torch.where(places, turn + 3, -1)
        return answered


class Replying:
    """Replies to each turn with what a function gives; an `Environments`."""

    def __init__(self, reply):
        self.reply, self.heard, self.drop_reasons = reply, [], {}

    def replies(self, turns):
        self.heard.append(turns)
        return [self.reply(turn) for turn in turns]

    async def replies_soon(self, turns):
        return self.replies(turns)


def collector(script, reply, turns=3, tokens=40, **keys):
    engine, environments = Scripted(script, **keys), Replying(reply)
    form = EpisodeForm(turns, tokens, 6, make_observer(TOKENIZER, chat=False))
    return RolloutCollector(engine, TOKENIZER, 6, environments, max_drop_rate=1.0, form=form)


def until(right):
    """Terminates on this answer with 1, and else says what was answered, backwards, for 0.25."""

    def reply(turn):
        if turn.answer == right:
            return Reply(1.0)
        return Reply(0.25, terminated=False, observation=(Message("user", f"{turn.answer[::-1]}>"),))

    return reply


SCRIPT = {(4, 0): ["56$", "78$", "9$"], (4, 1): ["9$"], (8, 0): ["0$", "9$"], (8, 1): ["1", "9$"]}


def test_answers_and_observations_stand_behind_each_other_as_they_were_sampled():
    played = collector(SCRIPT, until("9"), versions=True)
    batch = played.collect(PROMPTS, 2, step=5).batch
    whole = ["12>56$65>78$87>9$", "12>9$", "3>0$0>9$", "3>1"]
    for row, text in enumerate(whole):
        assert batch["input_ids"][row, : len(text)].tolist() == ids_of(text)
        assert batch["input_lengths"][row] == len(text)
    turns = ["00011100022200033", "00011", "00110022", "001"]
    logprobs = {0: 0.0, 1: -1.0, 2: -2.0, 3: -3.0}
    for row, numbers in enumerate(turns):
        mask = [int(number != "0") for number in numbers]
        width = batch["input_ids"].shape[1]
        assert batch["token_mask"][row].tolist() == mask + [0.0] * (width - len(mask))
        assert batch["turn_of_token"][row].tolist() == [*map(int, numbers)] + [0] * (width - len(mask))
        assert batch["generation_logprobs"][row].trunc().tolist() == [
            logprobs[int(number)] for number in numbers
        ] + [0.0] * (width - len(mask))
    assert batch["weight_versions"].amax(1).tolist() == [5, 3, 4, 3]
    assert batch["rewards"].tolist() == [1.5, 1.0, 1.25, 0.25]
    assert batch["ending"].tolist() == [Ending.TERMINATED] * 3 + [Ending.ANSWER_LIMIT]
    assert batch["finished"].tolist() == [True, True, True, False]


def test_only_rows_that_go_on_are_asked_with_their_turn():
    played = collector(SCRIPT, until("9"))
    played.collect(PROMPTS, 2, step=5)
    first, second, third = played.generation.asked
    assert "turn_index" not in first
    assert second["prompt_index"].tolist() == [4, 8]
    assert second["sample_index"].tolist() == [0, 0]
    assert second["turn_index"].tolist() == [1, 1]
    assert second["input_ids"].tolist() == [
        ids_of("12>56$65>"),
        ids_of("3>0$0>") + [TOKENIZER.pad_token_id] * 3,
    ]
    assert third["turn_index"].tolist() == [2]
    last = played.environments.heard[-1][0]
    assert [message.content for message in last.messages] == ["12>", "56", "65>", "78", "87>", "9"]


@pytest.mark.parametrize(
    ("limits", "ending", "length"),
    [
        ({"turns": 2}, Ending.TURN_LIMIT, len("12>56$65>78$")),
        ({"turns": 1}, Ending.TURN_LIMIT, len("12>56$")),
        ({"tokens": len("12>56$65>") + 6}, Ending.NO_ROOM, len("12>56$65>78$")),
        ({"tokens": len("12>56$65>") + 5}, Ending.NO_ROOM, len("12>56$")),
    ],
)
def test_a_limit_truncates_and_is_told_apart(limits, ending, length):
    played = collector({(4, 0): ["56$", "78$", "9$"]}, until("9"), **limits)
    batch = played.collect(PROMPTS[:1], 1, step=5).batch
    assert batch["ending"].tolist() == [ending]
    assert batch["input_lengths"].tolist() == [length]
    assert batch["finished"].tolist() == [False]
    assert ("turn_of_token" in batch) == (limits.get("turns") != 1)


def test_metadata_and_stop_strings_come_back_with_the_next_answer():
    def reply(turn):
        seen = turn.metadata or 0
        return Reply(0.0, seen == 2, (Message("user", ">"),), seen + 1, ("#",) * seen)

    played = collector({(4, 0): ["1$", "2$", "3$"]}, reply)
    played.collect(PROMPTS[:1], 1, step=5)
    assert [turns[0].metadata for turns in played.environments.heard] == [None, 1, 2]
    assert "stop_strings" not in played.generation.asked[1]
    assert played.generation.asked[2]["stop_strings"] == [("#",)]


def test_rewards_with_names_add_up_and_are_only_recorded():
    def reply(turn):
        parts = {"form": 0.5, "right": float(turn.answer == "9")}
        return Reply(sum(parts.values()), turn.answer == "9", (Message("user", ">"),), rewards=parts)

    rollout = collector(SCRIPT, reply).collect(PROMPTS, 2, step=5)
    batch = rollout.batch
    assert batch["rewards/form"].tolist() == [1.5, 0.5, 1.0, 0.5]
    assert batch["rewards/right"].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert batch["rewards"].tolist() == [2.5, 1.5, 2.0, 0.5]
    by_name = [sample.rewards for sample in samples_of(rollout, 5, TOKENIZER)]
    assert by_name[:2] == [{"form": 1.5, "right": 1.0}, {"form": 0.5, "right": 1.0}]
    left = trained_columns(batch)
    assert {"rewards", "token_mask", "ending"} <= left.keys()
    assert not {"rewards/form", "turn_of_token", "weight_versions"} & left.keys()


def test_all_of_a_reply_is_recorded_but_for_its_metadata():
    reply = Reply(0.5, False, (Message("tool", "7"),), {"left": 2}, ("#",), {"form": 0.5}, "7")
    assert json.loads(json.dumps(reply.to_json())) == {
        "reward": 0.5,
        "terminated": False,
        "observation": [["tool", "7"]],
        "stop_strings": ["#"],
        "rewards": {"form": 0.5},
        "answer": "7",
    }


def test_texts_lengths_and_metrics_of_episodes():
    rollout = collector(SCRIPT, until("9")).collect(PROMPTS, 2, step=5)
    assert rollout.responses == ["56$65>78$87>9$", "9", "0$0>9$", "1"]
    samples = samples_of(rollout, 5, TOKENIZER)
    assert [sample.rewards for sample in samples] == [None] * 4
    assert [sample.prompt_tokens for sample in samples] == [3, 3, 2, 2]
    assert [sample.response_tokens for sample in samples] == [8, 2, 4, 1]
    metrics = episode_metrics(rollout.batch)
    assert metrics["episodes/turns_mean"] == 1.75
    assert metrics["episodes/turns_max"] == 3
    assert metrics["episodes/observation_tokens_mean"] == 2.0
    assert metrics["episodes/terminated_rate"] == 0.75
    assert metrics["episodes/answer_limit_rate"] == 0.25
    # What stands in a batch is padded to other groups, and is the same.
    joined = Rollout.concatenate([select(rollout, [1]), rollout], TOKENIZER.pad_token_id)
    assert episode_metrics(select(joined, range(1, 5)).batch) == metrics


def test_rows_of_any_lengths_are_the_tokens_of_prompt_and_answer_one_by_one():
    noise = torch.Generator().manual_seed(0)
    asked, answered = drawn(rows=40, prompt=7, new=9, noise=noise)
    batch = played_once(asked, answered)
    columns = {"input_ids": TOKENIZER.pad_token_id, "generation_logprobs": 0.0, "weight_versions": -1}
    sampled = {"input_ids": "tokens", "generation_logprobs": "logprobs", "weight_versions": "weight_versions"}
    lengths = zip(asked["input_lengths"].tolist(), answered["lengths"].tolist(), strict=True)
    for row, (prompt, new) in enumerate(lengths):
        assert batch["input_lengths"][row] == prompt + new
        for column, fill in columns.items():
            before = asked["input_ids"][row, :prompt].tolist() if column == "input_ids" else [fill] * prompt
            expected = before + answered[sampled[column]][row, :new].tolist()
            width = batch[column].shape[1]
            assert batch[column][row].tolist() == expected + [fill] * (width - len(expected))
        assert batch["token_mask"][row].nonzero().flatten().tolist() == [*range(prompt, prompt + new)]
    assert (batch["input_ids"].dtype, batch["generation_logprobs"].dtype) == (torch.int64, torch.float32)


def drawn(rows, prompt, new, noise):
    """What is asked, and random answers to it, some of no token."""
    lengths = torch.randint(0, new + 1, (rows,), generator=noise)
    asked = BatchedDataDict(
        input_ids=torch.randint(0, 10, (rows, prompt), generator=noise),
        input_lengths=torch.randint(1, prompt + 1, (rows,), generator=noise),
        prompt_index=torch.arange(rows),
        sample_index=torch.zeros(rows, dtype=torch.long),
    )
    answered = BatchedDataDict(
        tokens=torch.randint(0, 10, (rows, new), generator=noise),
        logprobs=-torch.rand(rows, new, generator=noise),
        lengths=lengths,
        finished=lengths > 0,
        weight_versions=torch.where(torch.arange(new) < lengths.unsqueeze(1), 3, -1),
    )
    return asked, answered


def played_once(asked, answered):
    prompts = [Prompt(row, "1>", "1") for row in range(asked.size)]
    episodes = Episodes(prompts, asked, TOKENIZER, ONE_ANSWER)
    episodes.hear([Reply(1.0) for _ in episodes.answer(answered)])
    return episodes.batch()


def test_an_observation_that_was_cut_is_counted():
    def reply(turn):
        return Reply(1.0) if turn.answer == "9" else Reply(0.0, False, (Message("user", "1>"),), cut=7)

    batch = collector(SCRIPT, reply).collect(PROMPTS, 2, step=5).batch
    assert episode_metrics(batch)["episodes/observations_cut"] == 4.0
    assert batch["replies"][0][0]["cut"] == 7


def test_an_observation_that_cannot_be_encoded_drops_its_episode_alone():
    def reply(turn):
        return Reply(1.0) if turn.answer == "9" else Reply(0.5, False, (Message("user", "\x1b[2Jé>"),))

    played = collector(SCRIPT, reply)
    rollout = played.collect(PROMPTS, 2, step=5)
    batch = rollout.batch
    dropped, ended = Ending.DROPPED, Ending.TERMINATED
    assert batch["ending"].tolist() == [dropped, ended, dropped, Ending.ANSWER_LIMIT]
    assert batch["sample_mask"].tolist() == [0, 1, 0, 1]
    assert batch["rewards"].tolist() == [0, 1, 0, 0.5]
    assert "cannot encode" in batch["replies"][0][-1]["dropped"]
    with refused("too-many-dropped", "2 of 4", "encode", by=RunStoppedError):
        replace(played, max_drop_rate=0.25).check_drops(5, [rollout])


def test_observations_are_encoded_once_and_not_in_the_thread_of_the_loop():
    class Watching:
        def __init__(self):
            self.threads = []

        def ids_of(self, answer_ids, observation):
            self.threads.append(threading.get_ident())
            return make_observer(TOKENIZER, chat=False).ids_of(answer_ids, observation)

        def whole_prompt(self, prompt, messages, observation):
            return None

    played, watching = collector(SCRIPT, until("9")), Watching()
    played = replace(played, form=replace(played.form, observer=watching))

    async def respond(asked):
        return played.generation.generate(asked, step=5)

    batch = asyncio.run(played.play(PROMPTS, played.ask(PROMPTS, 2), respond))
    assert len(watching.threads) == 3
    assert threading.get_ident() not in watching.threads
    whole = collector(SCRIPT, until("9")).collect(PROMPTS, 2, step=5).batch
    assert whole.keys() == batch.keys()
    assert all(whole.pop(name) == batch.pop(name) for name in ("replies", "responses"))
    assert all(torch.equal(whole[name], batch[name]) for name in whole)


# One answer


def collect(texts, prompts, samples):
    """The rollout of answers of one turn, and the engine that gave them."""
    keys = [(prompt.index, sample) for prompt in prompts for sample in range(samples)]
    engine = Scripted({key: [text] for key, text in zip(keys, texts, strict=True)})
    environments = LocalEnvironments(ArithmeticEnvironment())
    return RolloutCollector(engine, TOKENIZER, 6, environments).collect(prompts, samples, step=9), engine


def test_a_rollout_has_the_engines_answers_and_their_rewards_in_order():
    prompts = [Prompt(4, "527>", "527"), Prompt(8, "1>", "1")]
    rollout, engine = collect(["527$", "52", "1$", "99999"], prompts, 2)
    batch = rollout.batch
    assert batch["input_ids"].shape[1] == 8, "no wider than the longest row"
    assert batch["rewards"].tolist() == [1.0, 0.5, 1.0, 0.0]
    assert rollout.responses == ["527", "52", "1", "99999"]
    assert batch["prompt_index"].tolist() == [4, 4, 8, 8]
    assert batch["sample_index"].tolist() == [0, 1, 0, 1]
    assert engine.step == 9
    assert engine.asked[0]["input_lengths"].tolist() == [4, 4, 2, 2]


def test_a_prompt_that_is_too_long_is_named_with_the_key():
    with refused("prompt-length", "prompt 17 ", 7, "data.max_input_seq_length"):
        collect(["1$"], [Prompt(17, "123456>", "1")], 1)


def test_a_prompt_has_a_token_at_least():
    rollout, _ = collect(["1$"], [Prompt(1, ">", "1")], 1)
    assert rollout.batch["token_mask"][0].argmax() == 1
    with refused("prompt-length", "prompt 2 ", 0):
        collect(["1$"], [Prompt(2, "", "1")], 1)


def test_select_and_concatenate_keep_rows_together():
    first, _ = collect(["1$", "2$"], [Prompt(1, "1>", "1"), Prompt(2, "2>", "2")], 1)
    second, _ = collect(["4567$"], [Prompt(3, "4567>", "4567")], 1)
    together = Rollout.concatenate([select(first, [1]), second], TOKENIZER.pad_token_id)
    assert together.responses == ["2", "4567"]
    assert [prompt.index for prompt in together.prompts] == together.batch["prompt_index"].tolist() == [2, 3]
    assert together.batch["input_ids"][0, 4:].unique().tolist() == [TOKENIZER.pad_token_id]


def test_routes_of_the_last_answer_cover_its_row():
    """Tokens after it, and rows of engines that returned none, have no route."""

    class Routed(Scripted):
        def generate(self, data, **options):
            answered = super().generate(data, **options)
            known = (data["input_lengths"] + answered["lengths"] - 1).tolist()
            numbers = [np.arange(tokens * 2, dtype=np.int8).reshape(tokens, 1, 2) for tokens in known]
            answered["routed_experts"] = [one + len(self.asked) for one in numbers]
            return answered

    def reply(turn):
        return Reply(1.0) if turn.answer == "9" else Reply(0.0, False, (Message("user", "1>"),))

    batch = replace(collector(SCRIPT, reply), generation=Routed(SCRIPT)).collect(PROMPTS, 2, step=5).batch
    turns = batch["turn_of_token"].amax(1)
    assert turns.unique().numel() > 1
    for row, (length, last) in enumerate(zip(batch["input_lengths"].tolist(), turns.tolist(), strict=True)):
        routes = batch["routed_experts"][row].flatten(1)
        assert (routes[: length - 1] == torch.arange((length - 1) * 2).view(-1, 2) + last).all()
        assert (routes[length - 1 :] == -1).all()
