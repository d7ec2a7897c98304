"""What pages say of the code in numbers and quotations is what the code has."""

import ast
import inspect
import json
import re
import tomllib
from typing import get_args

import pytest
import yaml
from doc_pages import PAGES, REPO, imported

import nemo_rl_mcore
from nemo_rl_mcore.config.base import Code
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.sums import StepTotals
from nemo_rl_mcore.rank.train_step import OptimizerOutcome, StepResult
from nemo_rl_mcore.rank.worker import MegatronPolicyWorker, as_result
from nemo_rl_mcore.recipe.load import load_config

pytestmark = pytest.mark.stage("docs")

ANY = "\0"


def table(page, heading):
    text = PAGES[page]
    lines = text[text.index(f"\n| {heading}") + 1 :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


# Troubleshooting


def as_text(node):
    """A string of the source, with ANY where a value is put in; None for what is none."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else ANY for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def docstrings(tree):
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


@pytest.fixture(scope="module")
def strings():
    """All strings of the package but its docstrings, a line each."""
    trees = [ast.parse(path.read_text("utf-8")) for path in (REPO / "nemo_rl_mcore").rglob("*.py")]
    found = (
        as_text(node)
        for tree in trees
        for left_out in [docstrings(tree)]
        for node in ast.walk(tree)
        if id(node) not in left_out
    )
    return "\n".join(text.replace("\n", " ") for text in found if text)


def messages():
    page = PAGES["docs/troubleshooting.md"]
    sections = [part for part in page.split("\n## ") if "| message |" in part]
    return [text for part in sections for text in re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE)]


def test_each_row_of_troubleshooting_quotes_a_message():
    page = PAGES["docs/troubleshooting.md"]
    rows = [line for line in page.partition("## No message")[0].splitlines() if line.startswith("| ")]
    headings = [line for line in rows if line.startswith(("| message", "| ---"))]
    assert len(messages()) == len(rows) - len(headings) > 20


@pytest.mark.parametrize("message", messages())
def test_each_quoted_message_is_one_of_the_package(strings, message):
    pattern = "[^\n]*".join(re.escape(part) for part in message.split("..."))
    assert re.search(pattern, strings)


# Numerics


def test_the_tolerances_are_those_of_the_tests():
    kept = imported(REPO / "tests/distributed/tolerances.py")
    shown = {name.strip("`"): float(value) for name, value, _ in table("docs/numerics.md", "name | allowed")}
    assert shown == {name: getattr(kept, name) for name in shown}
    assert len(shown) == 7


def test_the_kernels_tolerances_are_those_of_their_test():
    source = (REPO / "tests/distributed/test_ops_tensor_parallel.py").read_text("utf-8")
    line = re.search(r"^TOLERANCE = (.+)$", source, re.MULTILINE)
    assert line
    rows = table("docs/numerics.md", "dtype | outputs")
    assert {dtype.strip("`"): tuple(map(float, rest)) for dtype, *rest in rows} == ast.literal_eval(line[1])


PAPERS = [row for row in table("docs/algorithms.md", "paper | overrides") if row[0].startswith("[")]


@pytest.mark.parametrize(("paper", "overrides"), PAPERS, ids=[row[0][1:].partition("]")[0] for row in PAPERS])
def test_the_keys_of_a_paper_load(paper, overrides):
    recipe = "ppo_cpu" if paper.startswith(("[PPO]", "[VAPO]")) else "grpo_copy_cpu"
    load_config(REPO / f"examples/configs/{recipe}.yaml", overrides.strip("`").split())


# Files about the project


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text("utf-8"))
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", PAGES["CHANGELOG.md"], re.MULTILINE)
    assert project["version"] == citation["version"] == versions[0] == nemo_rl_mcore.__version__
    assert project["license"] == citation["license"]


# Codes


def test_the_codes_of_problems_are_those_of_the_package():
    rows = table("docs/configuration.md", "code | the value")
    told = [code for row in rows for code in re.findall(r"`([a-z-]+)`", row[0])]
    assert sorted(told) == sorted(get_args(Code.__value__))


# Callers written for NeMo RL

THEIRS = json.loads((REPO / "tests/fixtures/nemo_rl_worker.json").read_text("utf-8"))
OURS = {"worker": MegatronPolicyWorker, "Policy": Policy}


def told_of_nemo_rl(pattern):
    cells = [row[0] for row in table("docs/worker.md", "NeMo RL's")]
    return [found for cell in cells for found in re.findall(f"`{pattern}`", cell)]


def arguments(kind, name):
    written = inspect.signature(eval(f"lambda {THEIRS[kind][name]}: None"))
    return [
        one for one in written.parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]


def differences(kind):
    """Their calls that ours has not or that ours takes other arguments for, and arguments that it does not take."""
    for name in THEIRS[kind]:
        ours = getattr(OURS[kind], name, None)
        taken = inspect.signature(ours).parameters if ours else {}
        left_out = [one for one in arguments(kind, name) if one.name not in taken]
        kept = [one for one in arguments(kind, name) if one.name in taken]
        if ours and all(one.default is None for one in left_out) and takes(ours, kept):
            yield from (f"{name}({one.name}=)" for one in left_out)
        else:
            yield f"{name}()"


def takes(ours, given):
    places = [one.name for one in given if one.kind is not one.KEYWORD_ONLY]
    names = {one.name: one.name for one in given if one.kind is one.KEYWORD_ONLY}
    try:
        bound = inspect.signature(ours).bind("self", *places, **names)
    except TypeError:
        return False
    return all(value == name for name, value in bound.arguments.items() if name != "self")


@pytest.mark.parametrize("kind", OURS)
def test_the_calls_that_differ_from_nemo_rls_are_those_of_the_table(kind):
    told = set()
    for of, name, argument in told_of_nemo_rl(r"(?:(worker|Policy)\.)?(\w+)\((?:(\w+)=)?\)"):
        if of in ("", kind) and name in THEIRS[kind]:
            names = [one.name for one in arguments(kind, name)]
            told |= {f"{name}({argument}=)"} if argument in names else set() if argument else {f"{name}()"}
    assert told == set(differences(kind))


def test_the_results_that_are_not_there_are_those_of_the_table(monkeypatch):
    monkeypatch.setattr(accelerator, "gpu_name", lambda: "H100")
    policy = load_config(REPO / "examples/configs" / "grpo_copy_cpu.yaml").policy
    model = policy.model.model_copy(update={"num_moe_experts": 2, "mtp_num_layers": 1})
    step = StepResult(StepTotals(1, 1, {"loss": 0.0}, {}), OptimizerOutcome(True, 1, 1, 0), 1)
    found = as_result([step], policy.model_copy(update={"model": model}))
    assert found["gpu_name"] == "H100"
    assert sorted(told_of_nemo_rl(r"result\[\"(\w+)\"\]")) == sorted(set(THEIRS["result"]) - found.keys())
