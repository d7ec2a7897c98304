import torch
from algorithm_fakes import select
from refusals import refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.driver.rollouts.player import Rollout, RolloutCollector
from nemo_rl_mcore.environment.games import ArithmeticEnvironment
from nemo_rl_mcore.environment.interface import LocalEnvironments

TOKENIZER = load_tokenizer("char")


class Scripted:
    """A generation engine that answers with given texts; "$" ends a response."""

    def __init__(self, texts, width=5):
        self.texts, self.width = texts, width

    def generate(self, data, *, step, greedy=False):
        self.asked, self.step, self.greedy = data, step, greedy
        rows = [
            TOKENIZER.encode(text.rstrip("$")) + [TOKENIZER.eos_token_id] * text.endswith("$")
            for text in self.texts
        ]
        tokens = torch.zeros(len(rows), self.width, dtype=torch.long)
        logprobs = torch.zeros(len(rows), self.width)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
            logprobs[i, : len(row)] = -torch.arange(1.0, len(row) + 1) - i
        return BatchedDataDict(
            tokens=tokens,
            logprobs=logprobs,
            lengths=torch.tensor([len(row) for row in rows]),
            finished=torch.tensor([text.endswith("$") for text in self.texts]),
        )


def collect(texts, prompts, samples, max_prompt_length=6):
    engine = Scripted(texts)
    collector = RolloutCollector(
        engine, TOKENIZER, max_prompt_length, LocalEnvironments(ArithmeticEnvironment())
    )
    return collector.collect(prompts, samples, step=9), engine


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
    assert engine.asked["input_lengths"].tolist() == [4, 4, 2, 2]


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
