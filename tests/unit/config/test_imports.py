import subprocess
import sys

import pytest
from pydantic import TypeAdapter, ValidationError

from nemo_rl_mcore.config.custom_code import ImportPath, build
from nemo_rl_mcore.tools.check.machine import import_problems

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


def test_a_class_is_called_with_its_arguments():
    built = build("custom_parts:LengthReward", KEY, {"wanted": 3}, needs=("score",))
    assert built.wanted == 3


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        (
            "gone.mod:Name",
            {},
            r"^env\.custom\.type: gone\.mod:Name cannot be imported: No module named 'gone'",
        ),
        (
            "custom_parts:Gone",
            {},
            r"^env\.custom\.type: custom_parts:Gone: the module custom_parts has no Gone",
        ),
        ("custom_parts:NOT_A_CLASS", {}, r"NOT_A_CLASS in the module custom_parts is not a class"),
        ("custom_parts:Counting", {"seed": 1}, r"^env\.custom\.type: custom_parts:Counting lacks score"),
        (
            "custom_parts:LengthReward",
            {"length": 3},
            r"^env\.custom\.args: .* \(length\): got an unexpected keyword",
        ),
        (
            "custom_parts:BadReward",
            {},
            r"^env\.custom\.args: .* \(none\): missing a required argument: 'scores'",
        ),
        ("custom_parts:Unfinished", {}, r"lacks sums"),
    ],
)
def test_what_does_not_serve_names_its_key(path, arguments, message):
    needs = ("sums",) if "Unfinished" in path else ("score",)
    with pytest.raises(ValueError, match=message):
        build(path, KEY, arguments, needs=needs)


def test_a_module_that_fails_while_it_is_imported_names_the_key(monkeypatch, tmp_path):
    (tmp_path / "fails_inside.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"env\.custom\.type: .*No module named 'no_such_library'"):
        build("fails_inside:Name", KEY, {}, needs=())
