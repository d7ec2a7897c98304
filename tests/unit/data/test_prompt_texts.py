import pytest
from refusals import assert_holds, brief, briefs

from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.examples import read_set, read_texts
from nemo_rl_mcore.data.messages import Message

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
    "text",
    [
        "no place",
        "{} and {}",
        r"\boxed{} {}",
        "{0}",
        "{.__class__}",
        "{!r}",
        "{:9}",
        "{} {",
        "} {}",
    ],
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
