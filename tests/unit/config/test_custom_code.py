"""What the user's own classes raise names the key and the user's line, in whatever part of a run they are called."""

import sys
from pathlib import Path

import pytest

from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.config.custom_code import build
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.sources import open_prompts
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.environment.registry import make_environment
from nemo_rl_mcore.errors import CustomCodeError, RunStoppedError
from nemo_rl_mcore.recipe.load import load_config

MODULE = """
from nemo_rl_mcore.data.datasets import Prompt

ERRORS = {"value": (ValueError, "größer"), "exit": (SystemExit, 3), "stop": (StopIteration,), "memory": (MemoryError,)}

def error(kind):
    made, *arguments = ERRORS[kind]
    return made(*arguments)

class Env:
    def __init__(self, kind=None):
        self.kind = kind
        if kind == "late":
            self.gone
    def score(self, prompts, responses, finished):
        return self.inner()
    def inner(self):
        raise error(self.kind)  # here

class Data:
    def __init__(self, seed, kind):
        self.kind = kind
    def train_batch(self, step, count):
        if self.kind in ERRORS:
            raise error(self.kind)  # there
        texts = {"long": "0123456789>", "foreign": "ä>"}
        given = {
            "dicts": [{"index": 0, "text": "1>", "answer": "1"}] * count,
            "none": None,
            "number": [Prompt(index, "1>", 1) for index in range(count)],
        }
        fine = [Prompt(index, texts.get(self.kind, "1>"), "1") for index in range(count)]
        return given.get(self.kind, fine)
    validation = None
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "mine_of_test.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_of_test", raising=False)
    return tmp_path / "mine_of_test.py"


def line_of(path: Path, text: str) -> str:
    number = next(n for n, line in enumerate(path.read_text("utf-8").splitlines(), 1) if text in line)
    return f"({path}:{number})"


def environment(**args):
    return make_environment(EnvConfig.model_validate({"custom": {"type": "mine_of_test:Env", "args": args}}))


def source(kind):
    config = load_config(
        "examples/configs/grpo_copy_cpu.yaml",
        ["data.dataset_name=custom", "+data.type=mine_of_test:Data", f"+data.args.kind={kind}"],
    )
    return open_prompts(config, load_tokenizer("char"))


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        ("value", "ValueError: größer"),
        ("exit", "SystemExit: 3"),
        ("stop", "StopIteration"),
        ("memory", "MemoryError"),
    ],
)
def test_an_environment_and_a_data_set_that_raise(module, kind, raised):
    with pytest.raises(CustomCodeError) as caught:
        environment(kind=kind).score([Prompt(0, "1>", "1")], ["1"], [True])
    first, *shown = str(caught.value).splitlines()
    assert first == f"env.custom.type: mine_of_test:Env.score raised {raised} {line_of(module, '# here')}"
    assert [line.strip() for line in shown if "File" in line][-1].endswith("in inner")
    assert shown[-1].startswith(raised.partition(":")[0])
    assert not [line for line in shown if "nemo_rl_mcore" in line], (
        "the traceback begins with the user's code"
    )
    assert isinstance(caught.value, RunStoppedError)
    with pytest.raises(CustomCodeError) as caught:
        source(kind).train_batch(2, 4)
    told = f"data.type: mine_of_test:Data: train_batch(2, 4) raised {raised} {line_of(module, '# there')}"
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("dicts", "gave a dict for a Prompt: {'index': 0"),
        ("none", "raised TypeError: 'NoneType' object is not iterable"),
        ("number", "gave a Prompt whose answer is 1, no str"),
        ("long", ": prompt 0: the prompt has 11 tokens, and 4 are allowed: raise data.max_input_seq_length"),
        ("foreign", ": prompt 0: "),
    ],
)
def test_prompts_that_do_not_serve(module, kind, told):
    with pytest.raises(CustomCodeError) as caught:
        source(kind).train_batch(2, 4)
    text = str(caught.value)
    assert text.startswith("data.type: mine_of_test:Data: train_batch(2, 4)")
    assert told in text


def test_a_class_that_cannot_be_made_and_a_module_that_cannot_be_run(module):
    with pytest.raises(
        CustomCodeError, match=r"env\.custom\.type: mine_of_test:Env raised AttributeError: .*:\d+\)"
    ):
        environment(kind="late")
    module.with_name("broken_of_test.py").write_text("x = 1 / 0\n")
    with pytest.raises(CustomCodeError) as caught:
        build("broken_of_test:Name", "data.type", None, needs=())
    assert str(caught.value).startswith(
        "data.type: broken_of_test:Name: its module raised ZeroDivisionError: division by zero "
        f"({module.with_name('broken_of_test.py')}:1)"
    )
