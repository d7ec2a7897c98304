"""What the user's own classes raise names the key and the user's line, in whatever part of a run they are called."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.config.custom_code import ImportPath, build
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.sources import open_prompts
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.environment.registry import make_environment
from nemo_rl_mcore.errors import CustomCodeError, RunStoppedError
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check.machine import import_problems

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


KEY = "env.custom.type"


@pytest.mark.parametrize("path", ["mod:Name", "my_pkg.my_mod:MyLossFn", "a.b.c:_D1", "paquet.größe:Größe"])
def test_paths(path):
    assert TypeAdapter(ImportPath).validate_python(path) == path


@pytest.mark.parametrize(
    "path",
    [
        *("mod", "mod.Name", "mod:", ":Name", "mod:Outer.Inner", "mod:Name()", "mod:a:b", "../mod:Name"),
        *("1mod:Name", "mod :Name", "mod:Name\n", ".mod:Name", "a..b:Name", "os:system('x')", ""),
    ],
)
def test_what_is_no_path(path):
    with pytest.raises(ValidationError, match=r"write package\.module:Name"):
        TypeAdapter(ImportPath).validate_python(path)


def test_a_package_that_is_not_there_is_known_without_importing(monkeypatch, tmp_path):
    (tmp_path / "there.py").write_text("class Name: ...\nraise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    problems = [*import_problems({"data.type": "there:Name", KEY: "gone.mod:Name"})]
    assert [problem.path for problem in problems] == [KEY]
    assert "no module gone in" in problems[0].what
    assert "there" not in sys.modules


@pytest.mark.parametrize(
    ("source", "is_there"),
    [
        ("class Nam: ...", False),
        ("class Name: ...", True),
        ("if True:\n    class Name: ...", True),
        ("try:\n    from else_where import Name\nexcept ImportError:\n    Name = None", True),
        ("from else_where import Other as Name", True),
        ("from else_where import Name as Other", False),
        ("from else_where import *", True),
        ("def __getattr__(name): ...", True),
        ("globals()['Na' + 'me'] = object", True),
        ("class Name(", True),  # what is wrong with the module is told when it is imported
    ],
)
@pytest.mark.parametrize("module", ["mine", "mine.inside.deep"])
def test_a_class_that_is_not_there_is_known_without_importing(
    source, is_there, module, monkeypatch, tmp_path
):
    file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    if module != "mine":
        (tmp_path / "mine/__init__.py").write_text("raise SystemExit('imported')")
    file.write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    problems = [*import_problems({KEY: f"{module}:Name"})]
    assert [problem.path for problem in problems] == ([] if is_there else [KEY])
    assert not problems or ("Nam" in problems[0].remedy) == ("class" in source)


def test_the_working_directory_is_searched_after_what_is_installed(tmp_path):
    (tmp_path / "sched.py").write_text("raise SystemExit('not that of the standard library')")
    (tmp_path / "mine.py").write_text("class Mine: pass")
    code = (
        "import sys; sys.path = [entry for entry in sys.path if entry]\n"
        "from nemo_rl_mcore.config.custom_code import build\n"
        "assert type(build('mine:Mine', 'key.type', None, needs=())).__name__ == 'Mine'\n"
        "build('sched:scheduler', 'key.type', None, needs=())\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


@pytest.mark.parametrize(
    ("path", "arguments", "told"),
    [
        ("gone.mod:Name", {}, f"{KEY}: gone.mod:Name cannot be imported: No module named 'gone'"),
        ("custom_parts:Gone", {}, f"{KEY}: custom_parts:Gone: the module custom_parts has no Gone"),
        ("custom_parts:NOT_A_CLASS", {}, f"{KEY}: custom_parts:NOT_A_CLASS"),
        ("custom_parts:Counting", {"seed": 1}, f"{KEY}: custom_parts:Counting lacks score"),
        ("custom_parts:LengthReward", {"length": 3}, "env.custom.args: custom_parts:LengthReward"),
        ("custom_parts:BadReward", {}, "env.custom.args: custom_parts:BadReward"),
        ("custom_parts:Unfinished", {}, f"{KEY}: custom_parts:Unfinished lacks sums"),
    ],
)
def test_what_does_not_serve_names_its_key(path, arguments, told):
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        build(path, KEY, arguments, needs=("sums",) if "Unfinished" in path else ("score",))


def test_a_module_that_fails_while_it_is_imported_names_the_key(monkeypatch, tmp_path):
    (tmp_path / "fails_inside.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"env\.custom\.type: .*No module named 'no_such_library'"):
        build("fails_inside:Name", KEY, {}, needs=())
