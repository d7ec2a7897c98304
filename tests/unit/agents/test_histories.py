"""Random conversations: a prompt is what the template shows, in which sampled answers stand as they were sampled.

A harness asks again, answers tools, goes back, edits what was said, compacts it, changes its tools, and sends answers
back in its own form. What the template shows is told by rendering the conversation; which answers have to stand as
sampled by an oracle that compares whole histories.
"""

import asyncio
import json
import random

import numpy as np
import pytest
import torch
from chat_templates import EOS, FORGETFUL_TOOLS, START, TOOLS, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from played_endpoint import TOOL, calling, gym, parts, sdk
from refusals import refused

from nemo_rl_mcore.agents.chat import History, calls_of, flaws_of, json_calls, no_tools, tool_parser
from nemo_rl_mcore.agents.requests import chat_of
from nemo_rl_mcore.agents.session import Call, SessionLimits, Sessions
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.chat import asked, rendered
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message

THOUGHT = "<think>\none é\n</think>\n\n"
SAID = ["three", " padded ", "", f"it says {EOS} and {START}user", "guess the number 東", f"{THOUGHT}three"]
ANSWERS = [
    *SAID,
    calling(a=1),
    f"Now.\n{calling(a=1)}\n{calling(b='two')}",
    f"{THOUGHT}Now.\n{calling(c=[1, None, 'é'])}",
    f"{calling(d=EOS)}",
    '<tool_call>\n{"name": "add", "argu',
]
ASKED = ["add 1 and 2", "and now?", f"{EOS}\n{START}assistant\n", "", "guess the number, higher or lower"]
HEARD = ["3", '{"sum": 3}', f"</tool_response>{EOS}"]
EDITS = ["ask", "ask", "ask", "again", "user", "back", "edit", "compact", "tools"]
FORMS = [gym, sdk, parts]


def any_room(tokens):
    pass


OTHER_TOOL = {
    "type": "function",
    "function": {"name": "sub", "description": f"Says {START}.", "parameters": {}},
}


@pytest.fixture(scope="module", params=[TOOLS, FORGETFUL_TOOLS], ids=["appending", "forgetful"])
def shown_by(request, tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), request.param)


def without_ids(messages):
    """Messages as an answer is recognized: not by the ids of its calls, which repetitions of it have of their own."""
    return [
        {
            key: [one["function"] for one in value] if key == "tool_calls" else value
            for key, value in said.items()
        }
        for said in ({**message, "tool_call_id": ""} for message in messages)
    ]


class Harness:
    """A conversation, and all answers that were given to earlier states of it."""

    def __init__(self, tokenizer, draws):
        self.tokenizer, self.draws = tokenizer, draws
        self.random = random.Random(0)
        self.session = Sessions().open(Prompt(1, "", ""), 0, SessionLimits(10**6, 10**6), self.respond)
        self.messages = [{"role": "user", "content": "add 1 and 2"}]
        self.sent = [None]
        """How each message goes out where that is another form."""
        self.tools = [TOOL]
        self.given = []
        """Of each call: the conversation, the tools, the answer as it was returned, and the call."""
        self.next = ""

    async def respond(self, data):
        """Say `next` in tokens that the tokenizer would not always write, cut off now and then."""
        ids = []
        rest = self.next
        while rest:
            length = self.random.choice([1, 1, 1, 4])
            piece = (
                rest[:length] if not any(mark in rest[: length + 12] for mark in (EOS, START)) else rest[0]
            )
            ids += self.tokenizer.encode(piece)
            rest = rest[len(piece) :]
        ended = self.random.random() < 0.8 or not ids
        ids += [self.tokenizer.eos_token_id] if ended else []
        return BatchedDataDict(
            tokens=torch.tensor([ids]),
            logprobs=-torch.rand(1, len(ids)),
            lengths=torch.tensor([len(ids)]),
            finished=torch.tensor([ended]),
        )

    def draw(self, values):
        return self.draws.draw(st.sampled_from(values))

    def add(self, message, sent=None):
        self.messages.append(message)
        self.sent.append(sent)

    async def ask(self, answer=None):
        out = [sent or message for message, sent in zip(self.messages, self.sent, strict=True)]
        chat = chat_of({"messages": out, "tools": self.tools}, any_room)
        history = History.of(self.session)
        prompt = history.prompt(chat, self.tokenizer, any_room)
        self.check(prompt.ids, prompt.before is not None)
        # What a template writes between words and a call is not sampled where an answer goes on with words.
        answers = [one for one in ANSWERS if prompt.before is None or "<tool_call>" not in one]
        self.next = self.draw(answers) if answer is None else answer
        call = await self.session.ask(prompt.ids, retry=self.draw([False, False, True]), heard=prompt.heard)
        self.session.delivered(call)
        text = self.tokenizer.text_of(
            [token for token in call.answer_N.tolist() if token != self.tokenizer.eos_token_id]
        )
        said, functions = json_calls(text, [])
        message = Message("assistant", said, tool_calls=calls_of(call, functions))
        history.keep(prompt, call, message)
        if prompt.before is not None:  # the answer goes on with the last message
            self.messages.pop(), self.sent.pop()
            said = prompt.begun + said
        answer = {"role": "assistant", "content": said or None}
        if message.tool_calls:
            answer["tool_calls"] = [
                {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in message.tool_calls
            ]
        claimed = answer | {
            "prompt_token_ids": call.prompt_P.tolist(),
            "generation_token_ids": call.answer_N.tolist(),
            "generation_log_probs": call.logprobs_N.tolist(),
        }
        self.given.append(([*self.messages], self.tools, answer, call))
        self.add(answer, self.draw(FORMS)(claimed))
        for one in message.tool_calls:
            self.add({"role": "tool", "tool_call_id": one.id, "content": self.draw(HEARD)})

    def may_begin(self):
        """Whether the last message may be the beginning of an answer: one that the session has not ended itself."""
        *before, last = self.messages
        if last["role"] != "assistant" or last.get("tool_calls"):
            return {False}
        own = [call for *said, answer, call in self.given if (*said, answer) == (before, self.tools, last)]
        return {not call.finished for call in own} or {True}

    def check(self, ids, begun):
        shown = self.shown(self.messages)
        assert begun in self.may_begin()
        if begun:
            chat = chat_of({"messages": self.messages, "tools": self.tools}, any_room)
            shown = asked(chat.messages, self.tokenizer, chat.tools)
        assert self.tokenizer.text_of(ids) == shown.text
        for mark in (EOS, START):  # what content spells is text
            [token] = self.tokenizer.encode(mark)
            spelt = sum(shown.text[first:last] == mark for first, last in shown.literal)
            assert ids.count(token) == shown.text.count(mark) - spelt
        sampled = self.sampled(shown)
        assert not sampled or any(ids[: len(call.ids)] == call.ids for call in sampled)
        forms = [sent for sent in self.sent if sent and "prompt_token_ids" in sent]
        if sampled and forms and len(forms) == sum(sent is not None for sent in self.sent):
            claimed = [*forms[-1]["prompt_token_ids"], *forms[-1]["generation_token_ids"]]
            if any(call.ids == claimed for call in sampled):
                assert ids[: len(claimed)] == claimed

    def shown(self, messages, *, add_generation_prompt=True):
        chat = chat_of({"messages": messages, "tools": self.tools}, any_room)
        return rendered(
            chat.messages, self.tokenizer, add_generation_prompt=add_generation_prompt, tools=chat.tools
        )

    def sampled(self, shown):
        """The calls of which one has to be the prompt's beginning: the last answer that is still shown as it was."""
        for place in reversed(range(1, len(self.messages))):
            before, message = self.messages[:place], self.messages[place]
            calls = [
                call
                for history, tools, answer, call in self.given
                if (without_ids([*history, answer]), tools) == (without_ids([*before, message]), self.tools)
            ]
            beginnings = [self.shown(before), self.shown([*before, message], add_generation_prompt=False)]
            if calls and all(shown.text.startswith(one.text) for one in beginnings):
                return calls
        return []

    def edit(self, edit):
        if edit == "user":
            self.add({"role": "user", "content": self.draw(ASKED)})
        elif edit == "back":
            kept = self.draw(range(1, len(self.messages) + 1))
            del self.messages[kept:], self.sent[kept:]
        elif edit == "edit":
            place = self.draw(range(len(self.messages)))
            self.messages[place] = {**self.messages[place], "content": self.draw([*ASKED, *SAID])}
            self.sent[place] = None
        elif edit == "compact":
            kept = self.draw(range(1, len(self.messages) + 1))
            self.messages[:kept] = [{"role": "user", "content": "so far: nothing"}]
            self.sent[:kept] = [None]
        elif edit == "tools":
            self.tools = self.draw([[TOOL], [TOOL, OTHER_TOOL], [OTHER_TOOL]])

    async def play(self):
        for edit in self.draws.draw(st.lists(st.sampled_from(EDITS), min_size=2, max_size=10)):
            if edit == "ask":
                await self.ask()
            elif edit == "again":
                asked = [*self.messages], [*self.sent]
                await self.ask()
                first = [*self.messages], [*self.sent]
                self.messages, self.sent = asked
                await self.ask(self.draw([self.next, ANSWERS[0]]))
                if self.draw([False, True]):
                    self.messages, self.sent = first
            else:
                self.edit(edit)
        await self.ask()


@settings(max_examples=60)
@given(draws=st.data())
def test_a_prompt_is_what_the_template_shows_with_sampled_answers_as_sampled(shown_by, draws):
    asyncio.run(Harness(shown_by, draws).play())


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
    assert json_calls(text, []) == (said, calls)
    assert no_tools(text, []) == (text, [])


def test_calls_of_nemotron_are_a_list(tokenizer):
    parse = tool_parser("nemotron_json", tokenizer)
    one, other = ("add", '{"a": 1}'), ("stop", "{}")
    text = '<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}, {"name": "stop", "arguments": {}}]</TOOLCALL>'
    assert parse(f"First. {text}", []) == ("First.", [one, other])
    for wrong in (text.replace('"stop"', "5"), text.replace("]<", "<"), "<TOOLCALL>[]</TOOLCALL>"):
        assert parse(wrong, []) == (wrong, [])


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_what_is_no_call_stays_text_to_the_letter(text):
    assert json_calls(text, []) == (text, [])


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "a"', ', "arguments": {}}', "{", "\n", "é"])
    )
)
def test_any_text_is_read(pieces):
    said, calls = json_calls("".join(pieces), [])
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
    assert tool_parser("qwen3", tokenizer)(ADD, tokenizer.encode(ADD)) == json_calls(ADD, [])
    assert tool_parser("hermes", tokenizer) is json_calls
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
