"""What is read as a call of a tool, and what stays text."""

import json

import numpy as np
import pytest
from chat_templates import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from played_endpoint import calling
from refusals import refused

from nemo_rl_mcore.agents.chat import calls_of, flaws_of, hermes, no_tools, tool_parser
from nemo_rl_mcore.agents.session import Call
from nemo_rl_mcore.data.messages import Message

ADD = calling(a=1)
CALLED = ("add", '{"a": 1}')
CASES = {
    "alone": (ADD, "", [CALLED]),
    "behind a text": (f"I add.\n{ADD}", "I add.", [CALLED]),
    "between texts": (f"one\n{ADD}\ntwo {ADD}", "one\ntwo", [CALLED, CALLED]),
    "on one line": ('<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>', "", [CALLED]),
    "no arguments": ('<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    "letters": (
        '<tool_call>{"name": "say", "arguments": {"é": "東"}}</tool_call>',
        "",
        [("say", '{"é": "東"}')],
    ),
    "an end within": (
        '<tool_call>{"name": "say", "arguments": {"a": "</tool"}}</tool_call>',
        "",
        [("say", '{"a": "</tool"}')],
    ),
    "one broken": (f"<tool_call>no</tool_call>{ADD}", "<tool_call>no</tool_call>", [CALLED]),
}
TEXTS = [
    "three",
    "",
    ADD[:-1],
    ADD.removeprefix("<tool_call>"),
    "<tool_call></tool_call>",
    "<tool_call>[1]</tool_call>",
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
    "<tool_call>" + "[" * 100_000 + "</tool_call>",
    " \n padded ",
]


@pytest.mark.parametrize(("text", "said", "calls"), CASES.values(), ids=CASES)
def test_calls_of_hermes_are_read(text, said, calls):
    assert hermes(text, []) == (said, calls)
    assert no_tools(text, []) == (text, [])


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_what_is_no_call_stays_text_to_the_letter(text):
    assert hermes(text, []) == (text, [])


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "a"', ', "arguments": {}}', "{", "\n", "é"])
    )
)
def test_any_text_is_read(pieces):
    said, calls = hermes("".join(pieces), [])
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    assert calls or said == "".join(pieces)


def call_of(*, prompt=(1, 2), answer=(3, 4), number=1, repetition=0):
    ids = (np.array(one, dtype=np.int64) for one in (prompt, answer))
    return Call(number, *ids, np.zeros(2, dtype=np.float32), None, 0, True, repetition)


def test_ids_of_calls_depend_on_what_was_drawn_alone():
    def ids(**changes):
        return [call.id for call in calls_of(call_of(**changes), [CALLED, CALLED])]

    assert ids() == ids(number=7)
    others = [ids(prompt=(1, 3)), ids(answer=(3, 5)), ids(repetition=1), ids(prompt=(1,), answer=(2, 3, 4))]
    every = [one for found in (ids(), *others) for one in found]
    assert len({*every}) == len(every)
    assert all(len(one) == 9 and one.isalnum() for one in every)  # as templates of Mistral want them


@pytest.mark.needs("endpoint-clients")
def test_other_parsers_are_those_of_renderers(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, marks=("<tool_call>", "</tool_call>"))
    text = "I add.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    said, [(name, arguments)] = tool_parser("qwen3.5", tokenizer)(text, tokenizer.encode(text))
    assert (said, name) == ("I add.", "add")
    assert [*json.loads(arguments)] == ["a"]
    broken = text.replace("<function=add>", "")
    for parser, answer in (("qwen3.5", broken), ("qwen3.5", "three"), ("qwen3", "three")):
        assert tool_parser(parser, tokenizer)(answer, tokenizer.encode(answer)) == (answer, [])
    assert tool_parser("qwen3", tokenizer)(ADD, tokenizer.encode(ADD)) == hermes(ADD, [])
    assert tool_parser("hermes", tokenizer) is hermes
    with refused("unknown-tool-parser", "'pythonic'", "hermes", "qwen3.5"):
        tool_parser("pythonic", tokenizer)


@pytest.mark.parametrize(
    ("text", "flaws"),
    [
        ("three", []),
        ("<think>1 + 2</think>three", []),
        ("1 + 2</think>three", []),
        ("<think>1 + 2", []),
        ("<tool_call>{", ["invalid_tool_call"]),
        ("<think>I could <tool_call> here</think>three", []),
        ("<think>I <function_call></think>", ["invalid_tool_call"]),
        ("<think>1</think>2</think>three", ["malformed_thinking"]),
        ("<think>1<think>2</think>three", []),
        ("<think>1<think>2<think>3</think>", ["malformed_thinking"]),
        ("three <think>", ["malformed_thinking"]),
        ("<think>1</think><think></tool_call>", ["invalid_tool_call", "malformed_thinking"]),
    ],
)
def test_flaws_of_answers(text, flaws):
    assert flaws_of(Message("assistant", text)) == flaws


def test_a_thought_before_a_call_has_no_flaw():
    call = Call(1, np.array([1]), np.array([2]), np.zeros(1, np.float32), None, 0, True, 0)
    said = "<think>I use <tool_call>, not <think> or <think></think>"
    assert flaws_of(Message("assistant", said, tool_calls=calls_of(call, [CALLED]))) == []
