"""The size of the package, and what each process loads of it, are held at what was reached: tests/house.json.

A change that needs more raises a number there, in a line that a reader of the commit sees.
"""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nemo_rl_mcore"
REACHED = json.loads((ROOT / "tests/house.json").read_text())
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
LOADED = "print(sum(name.partition('.')[0] == 'nemo_rl_mcore' for name in __import__('sys').modules))"


def lines_of_code(text: str) -> int:
    """Lines that hold more than a docstring, a comment or an import."""
    left_out, held = set(), set()
    for node in ast.walk(ast.parse(text)):
        words = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if words or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= {*range(node.lineno, node.end_lineno + 1)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            held |= {*range(token.start[0], token.end[0] + 1)}
    return len(held - left_out)


def fields_of(tree: ast.Module) -> int:
    sections = [
        one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and one.name.endswith("Config")
    ]
    fields = [one for section in sections for one in section.body if isinstance(one, ast.AnnAssign)]
    return sum(isinstance(one.target, ast.Name) and not one.target.id.startswith("_") for one in fields)


def test_the_package_does_not_grow():
    texts = {path: path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {
        "files": len(texts),
        "lines of code": sum(map(lines_of_code, texts.values())),
        "functions": sum(isinstance(node, functions) for tree in trees.values() for node in ast.walk(tree)),
        "fields of config sections": sum(
            fields_of(tree) for path, tree in trees.items() if path.parent.name == "config"
        ),
        "refusals": sum(
            len(re.findall(r"\b(?:Problem|has_no_effect|RefusedError|CodedError)\(", text))
            for text in texts.values()
        ),
    }
    assert {name: count for name, count in found.items() if count > REACHED[name]} == {}


@pytest.mark.parametrize(
    ("process", "modules"),
    [
        pytest.param("a rank", "rank.worker, rank.megatron.backend", marks=pytest.mark.processes),
        pytest.param("a vLLM engine", "engine.vllm.engine", marks=pytest.mark.processes),
        ("an environment", "environment.registry"),
        ("check", "tools.check.plan"),
    ],
)
def test_a_process_loads_no_more_of_the_package(process, modules):
    code = "\n".join(f"import nemo_rl_mcore.{name}" for name in modules.split(", "))
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\n{LOADED}"], capture_output=True, text=True, timeout=300, check=True
    )
    assert int(run.stdout.split()[-1]) <= REACHED[f"modules loaded by {process}"]
