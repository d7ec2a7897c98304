"""Calls of tools in chat templates, and what stands behind an answer in the midst of a conversation."""

import json

import pytest
from chat_templates import EOS, FORGETFUL_TOOLS, REWRITING, START, TOOLS, byte_tokenizer

from nemo_rl_mcore.data.chat import Conversation, rendered
from nemo_rl_mcore.data.messages import Message, ToolCall

USER = Message("user", "question")
CALL = ToolCall("a1", "add", '{"a": 1, "b": "two"}')
CALLED = Message("assistant", "I add.", tool_calls=(CALL,))
HEARD = Message("tool", "3", tool_call_id="a1")
THOUGHT = Message("assistant", "<think>\none\n</think>\n\nthree")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

DROPPING = TOOLS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
"""As DeepSeek-R1's: no thought is ever shown."""
TWO_ENDS = TOOLS.replace(
    "{% endfor %}<|im_end|>\n{% endif %}", "{% endfor %}<|im_end|>{{ '!' if m.tool_calls }}\n{% endif %}"
)
"""What calls tools ends in another way."""


@pytest.fixture
def load(tmp_path):
    return lambda template=TOOLS: byte_tokenizer(tmp_path / "tokenizer", template)


def behind(tokenizer, messages, place, answer_ids=None, tools=()):
    answer = [5, tokenizer.eos_token_id] if answer_ids is None else answer_ids
    ids = Conversation(tokenizer, messages, tools).ids_behind(place, answer)
    return None if ids is None else tokenizer.text_of(ids)


@pytest.mark.parametrize("arguments", ["[1]", '{"a": ', "five"])
def test_arguments_that_are_no_object_are_shown_as_a_text(load, arguments):
    message = Message("assistant", "", tool_calls=(ToolCall("a1", "add", arguments),))
    shown = rendered([USER, message], load(), add_generation_prompt=False)
    assert f'"arguments": {json.dumps(arguments)}}}' in shown.text


SPELT = [
    ("tool", [USER, CALLED, Message("tool", f"a{EOS}b")], [TOOL]),
    ("name", [USER, Message("assistant", "", tool_calls=(ToolCall("a", f"a{START}b", "{}"),))], []),
    (
        "argument",
        [USER, Message("assistant", "", tool_calls=(ToolCall("a", "b", f'{{"c{EOS}": ["{START}"]}}'),))],
        [],
    ),
    (
        "escape",
        [USER, Message("assistant", "", tool_calls=(ToolCall("a", "b", '{"c": "\\u003c|im_end|>"}'),))],
        [],
    ),
    ("text", [USER, Message("assistant", "", tool_calls=(ToolCall("a", "b", f'{{"c": {EOS}'),))], []),
    (
        "description",
        [USER],
        [{"type": "function", "function": {"name": "a", "description": f"{EOS}{START}user"}}],
    ),
]


@pytest.mark.parametrize(("messages", "tools"), [case[1:] for case in SPELT], ids=[case[0] for case in SPELT])
def test_special_tokens_that_calls_tools_and_results_spell_stay_text(load, messages, tools):
    tokenizer = load()
    shown = rendered(messages, tokenizer, add_generation_prompt=True, tools=tools)
    ids = tokenizer.encode(shown.text, shown.literal)
    assert tokenizer.text_of(ids) == shown.text
    begins, ends = (ids.count(tokenizer.encode(mark)[0]) for mark in (START, EOS))
    turns = len(messages) + bool(tools)
    assert (begins, ends) == (turns + 1, turns)
    assert shown.text.count(START) + shown.text.count(EOS) > 2 * turns + 1


def test_behind_any_answer_stands_what_the_template_writes_of_all_that_follows(load):
    tokenizer, messages = load(), [USER, CALLED, HEARD, HEARD, THOUGHT, USER]
    tail = "\n<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"
    results = "\n<tool_response>\n3\n</tool_response>" * 2
    assert behind(tokenizer, messages, 4) == tail
    assert behind(tokenizer, messages, 1) == (
        f"\n<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n{THOUGHT.content}<|im_end|>{tail}"
    )
    assert behind(tokenizer, messages, 4, tokenizer.encode("three")) == f"<|im_end|>{tail}"
    assert behind(tokenizer, messages[:2], 1) == "\n<|im_start|>assistant\n"


def test_the_end_of_an_answer_that_calls_tools_may_be_another_one(load):
    tokenizer = load(TWO_ENDS)
    assert behind(tokenizer, [USER, CALLED, USER], 1) == (
        "!\n<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"
    )
    assert behind(tokenizer, [USER, THOUGHT, USER], 1).startswith("\n<|im_start|>user")


def test_a_turn_that_ends_only_where_another_one_follows_ends_once(load):
    tokenizer = load(
        "{% for m in messages %}{{ m.content }}{{ '' if loop.last else '<|im_end|>' }}{% endfor %}"
    )
    assert behind(tokenizer, [USER, CALLED, USER], 1) == "question"
    assert behind(tokenizer, [USER, CALLED, USER], 1, [5]) == "<|im_end|>question"


@pytest.mark.parametrize("template", [REWRITING, FORGETFUL_TOOLS], ids=["answers", "tools"])
def test_an_answer_that_is_not_shown_so_any_more_has_nothing_behind_it(load, template):
    tokenizer = load(template)
    assert behind(tokenizer, [USER, THOUGHT, USER], 1) is None
    assert behind(tokenizer, [USER, THOUGHT, Message("system", "go on")], 1) is not None
    plain = Message("assistant", "three")
    assert behind(tokenizer, [USER, plain, USER], 1) is not None
    assert behind(tokenizer, [USER, THOUGHT, USER, plain, USER], 3) is not None


def test_a_thought_that_a_template_never_shows_is_not_shown_as_it_was(load):
    tokenizer = load(DROPPING)
    assert behind(tokenizer, [USER, THOUGHT, USER], 1) is None
    assert behind(tokenizer, [USER, Message("assistant", "three"), USER], 1) is not None
