import json
import random
from pathlib import Path

import pytest
from chat_templates import APPENDING, EOS, FORGETFUL_TOOLS, REWRITING, START, STRICT, TOOLS, byte_tokenizer
from chat_tokenizer import FORGETFUL, TEMPLATE, chat_tokenizer, save_chat_tokenizer
from refusals import assert_holds, brief, briefs, refused

from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.data.answers import answer_row, conversation_row
from nemo_rl_mcore.data.chat import Conversation, make_observer, rendered, require_append_only, with_template
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.examples import read_set, read_texts
from nemo_rl_mcore.data.messages import Message, ToolCall
from nemo_rl_mcore.data.sources import RowLimits
from nemo_rl_mcore.data.tokenizer import CharTokenizer, ChatTemplate, load_tokenizer
from nemo_rl_mcore.recipe.load import load_config

TURNS = (
    Message("system", "Be brief."),
    Message("user", "2+2?"),
    Message("assistant", "4"),
    Message("user", "+1?"),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def recipe_with(data):
    config = load_config("examples/configs/sft_cpu.yaml")
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


def shown(tokenizer, ids, kept):
    """The text of the tokens that are kept, with a mark between runs."""
    text, before = "", False
    for token, keep in zip(ids, kept, strict=True):
        if keep:
            text += ("" if before or not text else " ... ") + tokenizer._tokenizer.decode([token])
        before = bool(keep)
    return text


def test_a_plain_text_is_a_users_message(tokenizer):
    prompt = with_template(Prompt(3, "2+2?", "4", rejected="5"), tokenizer)
    assert prompt == Prompt(
        3, "<turn>user\n2+2?<end>\n<turn>assistant\n", "4", "5", (Message("user", "2+2?"),)
    )


def test_a_turn_is_trained_on_to_its_end_where_the_template_writes_no_end_of_sequence(tmp_path):
    template = (
        "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}.{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
    )
    tokenizer = chat_tokenizer(tmp_path, template)
    row = conversation_row(TURNS, "five", tokenizer, imitate_all=True)
    assert shown(tokenizer, row.ids, row.trained) == "4. ... five."


def test_a_turn_is_trained_on_to_any_end_of_an_answer_that_the_template_writes(tmp_path):
    folder = save_chat_tokenizer(tmp_path, TEMPLATE.replace("<end>", "<pad>"))
    tokenizer = load_tokenizer(folder, ends=[0])
    row = conversation_row(TURNS, "five", tokenizer, imitate_all=True)
    assert shown(tokenizer, row.ids, row.trained) == "4<pad> ... five<pad>"


@pytest.mark.parametrize(
    ("imitated", "trained"),
    [
        ("answer", "4<end> ... five<end>"),
        ("to_turn_end", "4<end>\n ... five<end>\n"),
        ("turn", "<turn>assistant\n4<end>\n ... <turn>assistant\nfive<end>\n"),
    ],
)
def test_a_recipe_says_what_of_a_turn_is_trained_on(tmp_path, imitated, trained):
    template = ChatTemplate(imitated=imitated)
    tokenizer = load_tokenizer(save_chat_tokenizer(tmp_path), template=template)
    row = conversation_row(TURNS, "five", tokenizer, imitate_all=True)
    assert shown(tokenizer, row.ids, row.trained) == trained


@pytest.mark.parametrize("ends", ["", "\n", "<end>", "<end>\n"])
def test_a_row_ends_with_the_end_of_sequence_where_a_recipe_asks_for_it(tmp_path, ends):
    """As llm_message_utils.py of NeMo RL: unless line feeds alone stand behind one."""
    text = f"{{% for m in messages %}}{{{{ m.content }}}}{ends}{{% endfor %}}"
    folder = save_chat_tokenizer(tmp_path)
    for add_eos in (False, True):
        template = ChatTemplate(text, add_eos=add_eos, imitated="turn")
        tokenizer = load_tokenizer(folder, template=template)
        row = conversation_row(TURNS[1:2], "4", tokenizer, imitate_all=False)
        added = "<end>" if add_eos and "<end>" not in ends else ""
        assert shown(tokenizer, row.ids, row.trained) == f"4{ends}{added}"


@pytest.mark.parametrize("chat", [True, False])
def test_prompts_begin_with_the_begin_of_sequence_once(tmp_path, chat):
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = Path(save_chat_tokenizer(tmp_path))
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"bos_token": "<turn>"}))
    with_bos, without = (
        load_tokenizer(str(folder), parse_content=True, template=ChatTemplate(text, add_bos=bos))
        for bos in (True, False)
    )
    data = {"apply_chat_template": chat, "special_tokens_in_content": "parse"}
    limits = [RowLimits(recipe_with(data), one) for one in (with_bos, without)]
    plain, marked = Prompt(0, "2+2?", "4"), Prompt(1, "<turn>2+2?", "4")
    assert [one.rendered(plain).text for one in limits] == ["<turn>2+2?", "2+2?"]
    assert [one.rendered(marked).text for one in limits] == ["<turn>2+2?"] * 2
    row = answer_row(limits[0].rendered(plain), with_bos)
    assert shown(with_bos, row.ids, [not one for one in row.trained]) == "<turn>2+2?"


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    tokenizer = chat_tokenizer(tmp_path, FORGETFUL)
    turns = (Message("user", "2+2?"), Message("assistant", "sum|4"), Message("user", "+1?"))
    with refused("rewritten-turns", "data.apply_chat_template", 2):
        conversation_row(turns, "one more|5", tokenizer, imitate_all=True)
    # The last answer alone is shown as it will be asked for.
    row = conversation_row(turns, "one more|5", tokenizer, imitate_all=False)
    assert shown(tokenizer, row.ids, row.trained) == "one more|5<end>"


def test_a_template_whose_generation_prompt_is_not_how_a_turn_begins_is_refused(tmp_path):
    template = "{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}<end>{% endfor %}" + (
        "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
    )
    with refused("rewritten-turns", 1):
        conversation_row(TURNS[1:2], "4", chat_tokenizer(tmp_path, template), imitate_all=False)


def test_a_tokenizer_without_a_template_and_a_template_that_refuses_say_so(tmp_path):
    messages = [Message("user", "2+2?")]
    with refused("no-chat-template"):
        load_tokenizer("char").render_chat(messages, add_generation_prompt=True)
    bare = chat_tokenizer(tmp_path / "bare", None)
    with refused("no-chat-template"):
        bare.render_chat(messages, add_generation_prompt=True)
    strict = chat_tokenizer(tmp_path / "strict", "{{ raise_exception('no system turn') }}")
    with refused("refused-messages", "no system turn"):
        strict.render_chat(messages, add_generation_prompt=True)


@pytest.mark.parametrize(
    "text",
    [
        "{{ 1/0 }}",
        "{% include 'x' %}",
        "{{ messages.nothing.at_all }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_named(tmp_path, text):
    messages = [Message("user", "2+2?")]
    with refused("refused-messages", tmp_path / "own"):
        chat_tokenizer(tmp_path / "own", text).render_chat(messages, add_generation_prompt=True)
    chat_tokenizer(tmp_path / "other", "{{ messages[0].content }}")
    other = load_tokenizer(str(tmp_path / "other"), template=ChatTemplate(text))
    with refused("refused-messages", "policy.tokenizer.chat_template"):
        other.render_chat(messages, add_generation_prompt=True)


def test_the_template_of_a_recipe_takes_the_place_of_the_tokenizers(tmp_path):
    folder = save_chat_tokenizer(tmp_path)
    turns = "{% for m in messages %}[{{ m.role }}{{ mark }}]{{ m.content }}{% endfor %}"
    text = turns + "{% if add_generation_prompt %}>{% endif %}"
    own = load_tokenizer(folder, template=ChatTemplate(text, {"mark": "!"}))
    assert own.render_chat(TURNS[:2], add_generation_prompt=True) == "[system!]Be brief.[user!]2+2?>"
    own.save_as_hugging_face(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    assert again.render_chat(TURNS[1:2], add_generation_prompt=False) == "[user]2+2?"


USER, SYSTEM = Message("user", "2+2?"), Message("system", "Be brief.")
AROUND = "Answer in \\boxed{{}}:\n{}\nThink."
SHOWN = "Answer in \\boxed{}:\n2+2?\nThink."


@pytest.mark.parametrize(
    ("texts", "context", "chat", "shown"),
    [
        ((None, None), "2+2?", False, "2+2?"),
        ((AROUND, None), "2+2?", False, SHOWN),
        ((AROUND, "Be brief."), "2+2?", False, f"Be brief.\n{SHOWN}"),
        ((AROUND, "Be brief."), "2+2?", True, (SYSTEM, Message("user", SHOWN))),
        ((AROUND, None), (USER, Message("assistant", "4"), USER), True, None),
        ((None, "Other."), (SYSTEM, USER), True, (SYSTEM, USER)),
        ((None, "Be brief."), (USER,), True, (SYSTEM, USER)),
        (("Q: {}", None), "{0.__class__} {{}}", False, "Q: {0.__class__} {{}}"),
    ],
)
def test_what_is_shown(tmp_path, texts, context, chat, shown):
    keys = {}
    for key, text in zip(("prompt_file", "system_prompt_file"), texts, strict=True):
        if text is not None:
            (tmp_path / key).write_text(text)
            keys[key] = str(tmp_path / key)
    texts, problems = read_texts(SourceConfig(data_path="x", **keys))
    assert problems == []
    if shown is None:
        shown = (Message("user", SHOWN), Message("assistant", "4"), USER)
    asked = Prompt(0, context, "") if isinstance(context, str) else Prompt(0, "", "", context=context)
    prompt = texts.shown(asked, chat=chat)
    assert (prompt.context or prompt.text) == shown


@pytest.mark.parametrize(
    "text", ["no place", "{} and {}", r"\boxed{} {}", "{0}", "{.__class__}", "{!r}", "{:9}", "{} {", "} {}"]
)
def test_a_text_has_one_place_for_the_prompt_and_nothing_that_is_evaluated(tmp_path, text):
    path = tmp_path / "prompt.txt"
    path.write_text(text)
    source = SourceConfig(data_path=str(tmp_path / "rows.jsonl"), prompt_file=str(path))
    (tmp_path / "rows.jsonl").write_text('{"input": "2+2?", "output": "4"}\n')
    (example,), _, (problem,) = read_set("train", source, RowKind.PROMPTS, chat=False)
    assert example.text == "2+2?"
    assert brief(problem) == "train.prompt_file: not-allowed"
    assert_holds(problem.what, path)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    source = SourceConfig(
        data_path="a", prompt_file="gone.txt", system_prompt_file=str(tmp_path / "latin.txt")
    )
    _, problems = read_texts(source)
    assert briefs(problems) == ["prompt_file: not-readable", "system_prompt_file: not-readable"]
    assert "'gone.txt'" in problems[0].what
    assert "UTF-8" in problems[1].what


def test_a_byte_order_mark_is_no_part_of_the_texts(tmp_path):
    (tmp_path / "system.txt").write_text("Be brief.", "utf-8-sig")
    texts, problems = read_texts(SourceConfig(data_path="x", system_prompt_file=str(tmp_path / "system.txt")))
    assert (texts.system, problems) == ("Be brief.", [])


@pytest.fixture(scope="module")
def appending(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), APPENDING)


def observed(appending, *, role="user", content="42 é 東", answer=None):
    """The ids and the text behind an answer."""
    observer = make_observer(appending, chat=True)
    ids = observer.ids_of([7, appending.eos_token_id] if answer is None else answer, [Message(role, content)])
    return ids, appending.text_of(ids)


@pytest.mark.parametrize("chat", [False, True], ids=["characters", "template"])
def test_without_a_template_the_contents_stand_as_they_are_one_after_the_other(appending, chat):
    plain = appending if chat else CharTokenizer()
    observation = [Message("environment", "12"), Message("tool", "+3")]
    ids = make_observer(plain, chat=False).ids_of([5, 6], observation)
    assert ids == plain.encode("12") + plain.encode("+3")


def test_what_was_sampled_of_the_end_of_a_turn_is_not_written_again(appending):
    whole = appending.encode("call(2)<|im_end|>\n")
    assert observed(appending, answer=whole)[1] == (
        "<|im_start|>user\n42 é 東<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_blank_before_the_end_of_sequence_is_not_written_behind_it(tmp_path):
    strict = byte_tokenizer(tmp_path, STRICT)
    require_append_only(strict, "strict")
    assert observed(strict)[1] == "[INST] 42 é 東 [/INST]"
    assert observed(strict, answer=[7])[1] == " <|im_end|>[INST] 42 é 東 [/INST]"


def test_the_environments_role_is_the_users_where_the_template_does_not_know_it(appending, tmp_path):
    assert observed(appending, role="environment") == observed(appending, role="user")
    strict = byte_tokenizer(tmp_path / "strict", STRICT)
    assert observed(strict, role="environment") == observed(strict, role="user")
    knowing = chat_tokenizer(tmp_path / "knowing")
    assert observed(knowing, role="environment", content="4")[1].startswith("\n<turn>environment\n4")


@pytest.mark.parametrize("template", [APPENDING, STRICT], ids=["left out", "refused"])
def test_another_role_that_the_template_does_not_show_is_refused(tmp_path, template):
    known = byte_tokenizer(tmp_path, template)
    with refused("unknown-role", "data.apply_chat_template", "'judge'", "'user'", "'environment'"):
        observed(known, role="judge")


def test_an_episode_is_to_the_id_what_the_template_writes_of_the_conversation(appending):
    """Where the ids of an answer are those that its text is encoded to, which sampled ones need not be."""
    draws = random.Random(0)
    observer = make_observer(appending, chat=True)
    for _ in range(50):
        messages = [Message("user", "guess")]
        ids = appending.encode(appending.render_chat(messages, add_generation_prompt=True))
        for _ in range(draws.randint(1, 5)):
            answer = "".join(draws.choices("higher 42 é東", k=draws.randint(0, 9)))
            observation = [
                Message(draws.choice(["user", "tool", "tool"]), "".join(draws.choices("low 7ß", k=5)))
                for _ in range(draws.randint(0, 3))
            ]
            sampled = appending.encode(answer + draws.choice([EOS, EOS, ""]))  # or cut off
            ids += sampled + observer.ids_of(sampled, observation)
            messages += [Message("assistant", answer), *observation]
        assert ids == appending.encode(appending.render_chat(messages, add_generation_prompt=True))


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_first_text_that_differs(tmp_path):
    rewriting = byte_tokenizer(tmp_path, REWRITING)
    texts = ["<|im_start|>assistant\\n'", "'<think>\\nthe thought", "'the answer<|im_end|>"]
    with refused("rewritten-turns", "data.apply_chat_template", "models/qwen3", *texts, 3, "(user)"):
        require_append_only(rewriting, "models/qwen3")


def test_a_template_whose_generation_prompt_is_not_how_an_answer_begins_is_refused(tmp_path):
    template = APPENDING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    with refused("rewritten-turns", "'<think>", 2, "(assistant)"):
        require_append_only(byte_tokenizer(tmp_path, template), "thinker")


def test_a_template_that_shows_no_conversation_is_refused(tmp_path):
    with refused("no-chat-template"):
        require_append_only(byte_tokenizer(tmp_path), "none")


def test_a_forgetful_template_writes_what_it_would_forget_only_behind_the_answer(tmp_path):
    """It is not among the probes, and still no sampled id changes."""
    _, text = observed(chat_tokenizer(tmp_path, FORGETFUL), content="4")
    assert text == "\n<turn>user\n4<end>\n<turn>assistant\n"


def test_an_answer_may_end_with_any_of_several_ends(tmp_path):
    """The template's end of turn is none of the tokenizer's own, as in base models that learn conversations."""
    folder = tmp_path / "base"
    byte_tokenizer(folder, APPENDING.replace("<|im_end|>", "<|eot|>"), marks=("<|eot|>",))
    own = load_tokenizer(str(folder))
    [turn_end] = own.encode("<|eot|>")
    tokenizer = load_tokenizer(str(folder), ends=[turn_end])
    rest = "\n<|im_start|>user\n42 é 東<|eot|>\n<|im_start|>assistant\n"
    assert observed(tokenizer, answer=[7, turn_end])[1] == rest
    assert observed(tokenizer, answer=[7, own.eos_token_id])[1] == f"<|eot|>{rest}"


QUESTION = Message("user", "question")
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
    shown = rendered([QUESTION, message], load(), add_generation_prompt=False)
    assert f'"arguments": {json.dumps(arguments)}}}' in shown.text


def called(name, arguments):
    return [QUESTION, Message("assistant", "", tool_calls=(ToolCall("a", name, arguments),))]


DESCRIBED = {"type": "function", "function": {"name": "a", "description": f"{EOS}{START}user"}}
SPELT = {
    "tool": ([QUESTION, CALLED, Message("tool", f"a{EOS}b")], [TOOL]),
    "name": (called(f"a{START}b", "{}"), []),
    "argument": (called("b", f'{{"c{EOS}": ["{START}"]}}'), []),
    "escape": (called("b", '{"c": "\\u003c|im_end|>"}'), []),
    "text": (called("b", f'{{"c": {EOS}'), []),
    "description": ([QUESTION], [DESCRIBED]),
}


@pytest.mark.parametrize(("messages", "tools"), SPELT.values(), ids=SPELT)
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
    tokenizer, messages = (load(), [QUESTION, CALLED, HEARD, HEARD, THOUGHT, QUESTION])
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
    assert behind(tokenizer, [QUESTION, CALLED, QUESTION], 1) == (
        "!\n<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"
    )
    assert behind(tokenizer, [QUESTION, THOUGHT, QUESTION], 1).startswith("\n<|im_start|>user")


def test_a_turn_that_ends_only_where_another_one_follows_ends_once(load):
    tokenizer = load(
        "{% for m in messages %}{{ m.content }}{{ '' if loop.last else '<|im_end|>' }}{% endfor %}"
    )
    assert behind(tokenizer, [QUESTION, CALLED, QUESTION], 1) == "question"
    assert behind(tokenizer, [QUESTION, CALLED, QUESTION], 1, [5]) == "<|im_end|>question"


@pytest.mark.parametrize("template", [REWRITING, FORGETFUL_TOOLS], ids=["answers", "tools"])
def test_an_answer_that_is_not_shown_so_any_more_has_nothing_behind_it(load, template):
    tokenizer = load(template)
    assert behind(tokenizer, [QUESTION, THOUGHT, QUESTION], 1) is None
    assert behind(tokenizer, [QUESTION, THOUGHT, Message("system", "go on")], 1) is not None
    plain = Message("assistant", "three")
    assert behind(tokenizer, [QUESTION, plain, QUESTION], 1) is not None
    assert behind(tokenizer, [QUESTION, THOUGHT, QUESTION, plain, QUESTION], 3) is not None


def test_a_thought_that_a_template_never_shows_is_not_shown_as_it_was(load):
    tokenizer = load(DROPPING)
    assert behind(tokenizer, [QUESTION, THOUGHT, QUESTION], 1) is None
    assert behind(tokenizer, [QUESTION, Message("assistant", "three"), QUESTION], 1) is not None
