"""Files of prompts to answer."""

import json

import pytest
from chat_tokenizer import VOCABULARY, save_chat_tokenizer
from refusals import refused

from nemo_rl_mcore import RunStoppedError, load_config
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.driver.parts import tokenizer_of
from nemo_rl_mcore.tools.evaluate.generate import Asked, prompts_to_answer, read_prompts

USER = [{"role": "user", "content": "u"}]
SYSTEM = [{"role": "system", "content": "s"}, *USER]


@pytest.fixture
def answered(tmp_path, request):
    """The prompts of a call, of a recipe with a chat template in characters."""

    def prompts(*given):
        exemplar = request.config.rootpath / "examples/configs/grpo_copy_cpu.yaml"
        folder = save_chat_tokenizer(tmp_path / "tokenizer")
        named = (f"policy.tokenizer.name={folder}", f"policy.model.vocab_size={VOCABULARY}")
        sizes = ("policy.max_total_sequence_length=100", "policy.model.max_position_embeddings=100")
        data = ("data.dataset_name=jsonl", "++data.train.data_path=none", "data.apply_chat_template=true")
        config = load_config(exemplar, [*named, *sizes, *data])
        return prompts_to_answer(config, Asked(given), tokenizer_of(config.policy, config.data))

    return prompts


def test_conversations_are_prompts_one_or_many(answered):
    def texts(*given):
        return [(prompt.index, prompt.text) for prompt in answered(*given)]

    user, system = "<turn>user\nu<end>\n<turn>assistant\n", "<turn>system\ns<end>\n"
    assert texts(USER) == [(0, user)]
    assert texts("u") == [(0, user)]
    for given in ((USER, SYSTEM, "u"), ([USER, SYSTEM, "u"],), ([USER, SYSTEM], ["u"])):
        assert texts(*given) == [(0, user), (1, f"{system}{user}"), (2, user)]


@pytest.mark.parametrize("given", [USER[0], [{"role": "user"}], [{"content": "u"}], 5, [5]])
def test_what_is_neither_text_nor_messages_is_refused(answered, given):
    with refused("prompt-type", by=RunStoppedError):
        answered(given)


def test_a_text_has_a_prompt_a_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  two \r\nthree")
    prompts = read_prompts(path)
    assert [(prompt.index, prompt.text) for prompt in prompts] == [(0, "one"), (1, "  two "), (2, "three")]
    assert [prompt.place for prompt in prompts] == [f"{path}:{line}" for line in (1, 3, 4)]


def test_jsonl_has_a_prompt_or_messages(tmp_path):
    path = tmp_path / "prompts.jsonl"
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [{"prompt": "p"}, {"messages": turns}, {"question": "q", "prompt": "no"}, {"prompt": turns}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    prompts = read_prompts(path, "question")
    messages = (Message("system", "s"), Message("user", "u"))
    assert [(prompt.text, prompt.context) for prompt in prompts] == [
        ("p", ()),
        ("", messages),
        ("q", ()),
        ("", messages),
    ]


@pytest.mark.parametrize(
    ("line", "code", "key"),
    [
        ("{", "no-json", ""),
        ("[]", "no-prompt-key", "prompt, messages"),
        ('{"prompt": "a \\ud800"}', "no-text", ""),
        ('{"input": "x"}', "no-prompt-key", "prompt, messages"),
        ('{"prompt": 3}', "prompt-type", "prompt"),
        ('{"messages": []}', "prompt-type", "messages"),
        ('{"messages": [{"role": "user"}]}', "prompt-type", "messages"),
    ],
)
def test_a_line_that_is_none_is_told_by_its_place(tmp_path, line, code, key):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "p"}}\n{line}\n')
    with refused(code, f"{path}:2: ", key):
        read_prompts(path)


@pytest.mark.parametrize(("content", "code"), [(b"\n \n", "no-prompt"), (b"\xff", "no-text")])
def test_a_file_without_prompts(tmp_path, content, code):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    with refused(code, path):
        read_prompts(path)
    with refused("unreadable-file", tmp_path / "none"):
        read_prompts(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "text"), [("p.txt", "one\ntwo"), ("p.jsonl", '{"prompt": "one"}\n{"prompt": "two"}')]
)
def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path, name, text):
    (tmp_path / name).write_text(text, "utf-8-sig")
    assert [prompt.text for prompt in read_prompts(tmp_path / name)] == ["one", "two"]
