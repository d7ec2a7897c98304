"""Make the tokenizer and the rows of the agents' CPU recipes, the same bytes at every call.

    uv run python examples/configs/agents/make_data.py

The task: find out by a tool what belongs to a number, and say it. Digits are tokens, and so is the whole call of the
tool, so that a tiny model can learn it. conversations.jsonl shows the form; tasks.jsonl has what the tool says.
"""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
PAD, END = "<|pad|>", "<|end|>"
CALL = '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>'
CHARACTERS = "0123456789?."
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {}}</tool_call>{% endfor %}'
    "{{ message.content or '' }}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a character, one a role, and one for the call."""
    marks = [PAD, END, "<|user|>", "<|assistant|>", "<|tool|>"]
    words = [*marks, *CHARACTERS, CALL]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer.add_tokens([AddedToken(CALL, normalized=False)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=marks[2:],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def main() -> None:
    """Write all files."""
    make_tokenizer().save_pretrained(FOLDER / "tokenizer")
    draws = random.Random(0)
    found = {f"{number:02d}?": f"{draws.randrange(100):02d}" for number in range(100)}
    talks = [
        [
            {"role": "user", "content": question},
            {"role": "assistant", "content": CALL},
            {"role": "tool", "content": answer},
            {"role": "assistant", "content": answer},
        ]
        for question, answer in found.items()
    ]
    _write("conversations.jsonl", [{"messages": talk} for talk in talks])
    _write("tasks.jsonl", [{"input": question, "output": answer} for question, answer in found.items()])


def _write(name: str, rows: list[dict[str, object]]) -> None:
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (FOLDER / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
