"""Episodes of a model that knows nothing with an environment that says anything, for what must hold of all of them."""

import random
from dataclasses import dataclass

import torch

from nemo_rl_mcore.data.chat import make_observer, with_template
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.driver.rollouts.player import EpisodeForm, RolloutCollector
from nemo_rl_mcore.environment.turns import Reply
from nemo_rl_mcore.ops.sampling import sample_keys

SEED, STEP, TURNS, NEW_TOKENS = 7, 4, 4, 6
TEMPERATURE = 0.7
PROMPTS, SAMPLES = 25, 8
TEXTS = "0123456789+="
ROLES = ("user", "tool", "environment")


class AnyReply:
    """An `Environments` of random texts, in any role, that ends an episode after any of its turns."""

    def __init__(self, texts):
        self.texts, self.drop_reasons = texts, {}

    def replies(self, turns):
        return [self._reply(turn) for turn in turns]

    def _reply(self, turn):
        draws = random.Random(repr((turn.prompt.index, turn.messages)))
        if draws.random() < 0.25:
            return Reply(draws.random())
        said = ["".join(draws.choices(self.texts, k=draws.randint(0, 4))) for _ in range(draws.randint(1, 2))]
        role = draws.choice(ROLES)
        stop_strings = tuple(draws.choices(self.texts, k=draws.randint(0, 2)))
        return Reply(
            draws.random(),
            terminated=False,
            observation=tuple(Message(role, text) for text in said),
            stop_strings=stop_strings,
        )


@dataclass(frozen=True)
class Asking:
    """A `GenerationInterface` of whatever answers a batch."""

    ask: object

    def generate(self, data, *, step, greedy=False):
        return self.ask(data, step)


def stop_ids(tokenizer):
    """A third of all ids ends an answer, with or without the end of sequence."""
    return (tokenizer.eos_token_id, *range(3, tokenizer.vocab_size, 3))


def play(ask, tokenizer, *, chat=False, tokens=96, prompts=PROMPTS, samples=SAMPLES):
    """Episodes of one to TURNS turns. ask: gives the answers to a batch in a step."""
    draws = random.Random(1)
    asked = [Prompt(i, "".join(draws.choices(TEXTS, k=draws.randint(1, 4))), "") for i in range(prompts)]
    if chat:
        asked = [with_template(prompt, tokenizer) for prompt in asked]
    form = EpisodeForm(TURNS, tokens, NEW_TOKENS, make_observer(tokenizer, chat=chat))
    # The characters' vocabulary is what its tokenizer takes; others are bytes to one that falls back to them.
    texts = TEXTS if type(tokenizer).__name__ == "CharTokenizer" else f"{TEXTS} é東\n<|im_end|>"
    collector = RolloutCollector(Asking(ask), tokenizer, tokens, AnyReply(texts), form=form)
    return collector.collect(asked, samples, step=STEP)


class Drawn(dict):
    """The ids that were drawn, by the key of their noise; each is noted once."""

    def note(self, key, ids):
        assert key not in self, "a key for each response"
        self[key] = [*ids]

    def noting(self, ask, seed=SEED):
        """As `ask`, and what it answers is noted."""

        def asked(data, step):
            found = ask(data, step)
            keys = sample_keys(seed, step, data["prompt_index"], data["sample_index"], data.get("turn_index"))
            rows = zip(keys.tolist(), found["tokens"].tolist(), found["lengths"].tolist(), strict=True)
            for key, ids, length in rows:
                self.note(key, ids[:length])
            return found

        return asked


def trained_by_key(batch, seed=SEED):
    """What is trained on of each turn, by the key of its noise."""
    found = {}
    for turn in range(1, TURNS + 1):
        rows = torch.full_like(batch["prompt_index"], turn - 1)
        keys = sample_keys(seed, STEP, batch["prompt_index"], batch["sample_index"], rows)
        for row, key in enumerate(keys.tolist()):
            trained = (batch["token_mask"][row] != 0) & (batch["turn_of_token"][row] == turn)
            if trained.any():
                found[key] = batch["input_ids"][row][trained].tolist()
    return found


def observed_otherwise(batch):
    """The batch with other numbers wherever no token was sampled."""
    generator = torch.Generator().manual_seed(3)
    columns = {
        name: torch.where(
            batch["token_mask"] != 0, batch[name], torch.randn(batch[name].shape, generator=generator) - 3
        )
        for name in ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    }
    return replace_columns(batch, columns)


def replace_columns(batch, columns):
    return type(batch)({**batch, **columns})


def with_what_a_loss_reads(batch):
    """Random advantages, and log-probabilities near those of generation."""
    generator = torch.Generator().manual_seed(2)
    drawn = batch["generation_logprobs"]
    noise = [torch.randn(drawn.shape, generator=generator) for _ in range(3)]
    return replace_columns(
        batch,
        {
            "advantages": noise[0],
            "prev_logprobs": drawn + 0.01 * noise[1],
            "reference_policy_logprobs": drawn + 0.1 * noise[2],
        },
    )
