"""Make the tokenizer and the data of the quick start's CPU recipes, the same bytes at every call.

    uv run python examples/configs/quickstart/make_data.py

Word problems of one sum or difference, in the schemas of the real sets: conversations as in Tulu-3, questions and
solutions as in GSM8K, pairs of answers to prefer. No problem of the test file is in another one.
"""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
INSTRUCTION = (FOLDER / "prompts/gsm8k.txt").read_text("utf-8")
NAMES = ("Ann", "Ben", "Eva", "Ian", "Kim", "Leo", "Mia", "Tom")
THINGS = ("apples", "books", "cards", "eggs", "nuts", "pens", "shells", "stamps")
ROWS = {"chat": 320, "train": 320, "test": 128, "pairs": 320}
VOCABULARY = 384
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
# No end behind a user's turn: all that the model has to learn of the form is its own end.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Problem(NamedTuple):
    """A word problem: somebody has `first` things and gets or gives away `second` of them."""

    name: str
    thing: str
    first: int
    second: int
    sign: str

    @property
    def question(self) -> str:
        """The problem in words."""
        does = f"buys {self.second} more" if self.sign == "+" else f"gives {self.second} away"
        asked = f"How many {self.thing} does {self.name} have now?"
        return f"{self.name} has {self.first} {self.thing} and {does}. {asked}"

    @property
    def result(self) -> int:
        """How many things there are then."""
        return self.first + self.second if self.sign == "+" else self.first - self.second

    def solution(self, result: int) -> str:
        """Return a solution in GSM8K's form, of which the result need not be right."""
        return f"{self.first} {self.sign} {self.second} = {result}\n#### {result}"


def all_problems() -> Iterator[Problem]:
    """Yield sums of two numbers up to 7, and the differences that undo them."""
    for name in NAMES:
        for thing in THINGS:
            for first in range(1, 8):
                for second in range(1, 8):
                    yield Problem(name, thing, first, second, "+")
                    yield Problem(name, thing, first + second, second, "-")


def conversation(number: int, problem: Problem) -> dict[str, object]:
    """Return a row in the schema of Tulu-3."""
    turns = (("user", INSTRUCTION.format(problem.question)), ("assistant", problem.solution(problem.result)))
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"id": f"quickstart_{number}", "messages": messages, "source": "word_problems"}


def question(problem: Problem) -> dict[str, object]:
    """Return a row in the schema of GSM8K."""
    return {"question": problem.question, "answer": problem.solution(problem.result)}


def pair(problem: Problem, miss: int) -> dict[str, object]:
    """Return the right solution, preferred to one that misses the result."""
    return {
        "prompt": INSTRUCTION.format(problem.question),
        "chosen": problem.solution(problem.result),
        "rejected": problem.solution(problem.result + miss),
    }


def write_rows(name: str, rows: Iterable[dict[str, object]]) -> None:
    """Write a JSONL file below data/."""
    (FOLDER / "data").mkdir(exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (FOLDER / f"data/{name}.jsonl").write_text(text, "utf-8")


def make_data() -> None:
    """Deal the problems out to the files."""
    draw = random.Random(0)
    problems = list(all_problems())
    draw.shuffle(problems)
    deck = iter(problems)
    dealt = {name: [next(deck) for _ in range(count)] for name, count in ROWS.items()}
    write_rows("chat", (conversation(number, problem) for number, problem in enumerate(dealt["chat"])))
    write_rows("train", map(question, dealt["train"]))
    write_rows("test", map(question, dealt["test"]))
    write_rows("pairs", (pair(problem, draw.choice((1, 2, 3))) for problem in dealt["pairs"]))


def make_tokenizer() -> None:
    """Byte-level BPE over the shipped text; each digit is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rows = map(json.loads, (FOLDER / "data/chat.jsonl").read_text("utf-8").splitlines())
    texts = [message["content"] for row in rows for message in row["messages"]]
    tokenizer.train_from_iterator(texts, trainer)
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=list(SPECIAL[2:]),
        clean_up_tokenization_spaces=False,
        model_max_length=128,
        chat_template=CHAT_TEMPLATE,
    )
    saved.save_pretrained(FOLDER / "tokenizer")


if __name__ == "__main__":
    make_data()
    make_tokenizer()
