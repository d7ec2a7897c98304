import json
from pathlib import Path

import pytest
from chat_tokenizer import FORGETFUL, TEMPLATE, chat_tokenizer, save_chat_tokenizer
from refusals import refused

from nemo_rl_mcore.data.answers import (
    answer_row,
    conversation_row,
    given_answers,
)
from nemo_rl_mcore.data.chat import with_template
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.sources import RowLimits
from nemo_rl_mcore.data.tokenizer import ChatTemplate, load_tokenizer
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


@pytest.mark.parametrize(
    ("imitate_all", "trained"), [(True, "4<end> ... five<end>"), (False, "five<end>")], ids=["all", "last"]
)
def test_the_assistants_tokens_alone_are_trained_on(tokenizer, imitate_all, trained):
    row = conversation_row(TURNS, "five", tokenizer, imitate_all=imitate_all)
    whole = [*TURNS, Message("assistant", "five")]
    assert list(row.ids) == tokenizer.encode(tokenizer.render_chat(whole, add_generation_prompt=False))
    assert shown(tokenizer, row.ids, row.trained) == trained


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


def test_given_answers_are_conversations_where_there_is_a_context_and_plain_where_not(tokenizer):
    talk = Prompt(7, "", "five", context=TURNS, imitate_all=True)
    plain = Prompt(8, "2+2=", "4")
    batch = given_answers([talk, plain], tokenizer)
    texts = [
        shown(tokenizer, row[:length], mask[:length])
        for row, length, mask in zip(
            batch["input_ids"].tolist(),
            batch["input_lengths"].tolist(),
            batch["token_mask"].tolist(),
            strict=True,
        )
    ]
    assert texts == ["4<end> ... five<end>", "4<end>"]
    assert batch["prompt_index"].tolist() == [7, 8]
    assert batch["input_ids"][1].tolist()[6:] == [tokenizer.pad_token_id] * (batch["input_ids"].shape[1] - 6)
    assert not batch["token_mask"][1, 6:].any()


def test_the_template_of_a_recipe_takes_the_place_of_the_tokenizers(tmp_path):
    folder = save_chat_tokenizer(tmp_path)
    turns = "{% for m in messages %}[{{ m.role }}{{ mark }}]{{ m.content }}{% endfor %}"
    text = turns + "{% if add_generation_prompt %}>{% endif %}"
    own = load_tokenizer(folder, template=ChatTemplate(text, {"mark": "!"}))
    assert own.render_chat(TURNS[:2], add_generation_prompt=True) == "[system!]Be brief.[user!]2+2?>"
    own.save_as_hugging_face(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    assert again.render_chat(TURNS[1:2], add_generation_prompt=False) == "[user]2+2?"
