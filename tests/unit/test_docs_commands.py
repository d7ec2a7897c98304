"""The commands of the pages exist: programs, subcommands, flags, recipes, files, extras. Nothing of them is run here.

What runs: those of the quick start (tests/learning/quickstart.py), and what blocks of other languages show.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise

import pytest
import yaml
from doc_pages import PAGES, REPO, blocks, in_backticks
from ray.scripts.scripts import cli as ray_cli

from nemo_rl_mcore.cli.arguments import parse
from nemo_rl_mcore.config.cluster import seconds_of
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.migrate.migrate import load_migrated

pytestmark = pytest.mark.stage("docs")

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
GROUPS = PROJECT["dependency-groups"]
MARKERS = {line.partition(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
TOOLS = {"ruff", "pyright", "lint-imports", "mkdocs"}
# What the package neither has nor installs.
OTHERS = {"pip", "source", "export", "curl", "vllm", "tensorboard", "npx", "sbatch", "kubectl"}
# What the reader is told to write, or has from the step before.
THEIRS = {"recipe.yaml", "ours.yaml"}
# Written by a command before: tests/functional/test_agents_of_others.py.
OF_AGENTS = re.compile(r"results/\w+/(sft|grpo)\.yaml")
QUICKSTART = "docs/quickstart.md"  # its recipes are those that its first command copies: test_quickstart.py


def simple_commands(text):
    """The words of each command, without variables before it, continuations and comments."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r" (?:&&|\|) ", line):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield words


IN_LINES = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{name}.md" for name in ("numerics", "performance", "async")),
)
TEXTS = [(page, text) for page, _, text in blocks("bash")]
TEXTS += [
    (page, text)
    for page in IN_LINES
    for text in in_backticks(page)
    if re.match(r"(uv|python|bash|nemo-rl-mcore) .*[/-]", text)
]
COMMANDS = [(page, words) for page, text in TEXTS for words in simple_commands(text)]


def without_uv(words):
    """A command behind `uv run`, whose extras and groups exist."""
    if words[1:2] in (["build"], ["pip"], ["venv"]):
        return ["pip"]
    if words[0] != "uv":
        return words
    assert words[1] in ("run", "sync"), words
    rest = words[2:]
    known = {"--extra": EXTRAS, "--group": GROUPS}
    while rest and rest[0] in known:
        assert rest[1] in known[rest[0]], words
        rest = rest[2:]
    return rest or ["pip"]


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=lambda value: value if isinstance(value, str) else " ".join(value)[:60]
)
def test_each_command_exists(page, words):
    program, *arguments = without_uv(words)
    match program:
        case "nemo-rl-mcore":
            is_a_command(page, arguments)
        case "python" | "build/nemo_gym/bin/python":
            is_a_script(arguments)
        case "bash":
            assert (REPO / arguments[0]).is_file()
        case "pytest":
            are_tests(arguments)
        case "ray":
            are_options_of_ray(arguments)
        case _:
            assert program in TOOLS | OTHERS


def is_a_command(page, arguments):
    options, overrides = parse(arguments)
    recipe = getattr(options, "config", None)
    if recipe and page != QUICKSTART and not OF_AGENTS.fullmatch(recipe) and recipe not in THEIRS:
        # As the command finds it: a file, else a recipe that is shipped.
        path = REPO / recipe if (REPO / recipe).is_file() else recipe
        migrates = getattr(options, "migrate", False)
        config = load_migrated(path, overrides).config if migrates else load_config(path, overrides)
        assert config is not None
        assert options.command in ("check", "doctor", config.algorithm)


def is_a_script(arguments):
    if arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1])
    else:
        source = (REPO / arguments[0]).read_text("utf-8")
        for flag in (text for text in arguments if text.startswith("--")):
            assert f'"{flag}"' in source or flag.removeprefix("--").replace("-", "_") in source, flag


def are_tests(arguments):
    for flag, value in pairwise(arguments):
        assert flag != "-m" or not value or value in MARKERS
    for path in (text for text in arguments if "/" in text):
        assert (REPO / path).exists()


def are_options_of_ray(arguments):
    command, *given = arguments
    known = {option for parameter in ray_cli.commands[command].params for option in parameter.opts}
    assert {word.partition("=")[0] for word in given if word.startswith("-")} <= known


def claims():
    _, _, table = PAGES["docs/numerics.md"].partition("\n| claim | command |")
    rows = re.findall(r"^\| (.+) \| `(.+)` \|$", table.partition("\n\n")[0], re.MULTILINE)
    return {claim: without_uv(shlex.split(command))[1:] for claim, command in rows}


@pytest.mark.exhaustive
@pytest.mark.parametrize("tiers", [[], ["-m", ""]], ids=["quick", "all"])
def test_each_claim_is_tested_by_its_command(tiers):
    """With the tiers that the command asks for: a file may have no test in the quick one."""
    files = [arguments[-1] for arguments in claims().values() if ("-m" in arguments) == bool(tiers)]
    assert len(files) >= 3
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "--collect-only", *tiers, *files],
        cwd=REPO, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert set(files) == {line.partition("::")[0] for line in found.stdout.splitlines() if "::" in line}


# docs/clusters: scripts and manifests, none of which has run on a cluster

RAY_START = {option for parameter in ray_cli.commands["start"].params for option in parameter.opts}
TWO_MACHINES = "recipes/llm/grpo-qwen3-30ba3b-2n8g-megatron-tp2ep8-fused.yaml"


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """Write programs that stand in the place of Slurm's and Ray's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write(**programs):
        for name, text in programs.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n", "utf-8")
            (tmp_path / name).chmod(0o755)

    return write


def test_the_slurm_script_starts_what_ray_and_the_recipe_take(on_path, monkeypatch):
    on_path(
        scontrol="printf 'first\\nsecond\\n'",
        hostname="echo 192.0.2.1 192.0.2.2",
        srun='while [[ $1 == --* ]]; do shift; done; "$@"',
        ray='echo "$RAY_ADDRESS ${#RAY_AUTH_TOKEN} $RAY_AUTH_MODE"; printf "%s\\n" "$@"',
    )
    monkeypatch.setenv("SLURM_JOB_NODELIST", "machines[1-2]")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    recipe = str(REPO / "examples/configs" / TWO_MACHINES)
    script = REPO / "docs/clusters/slurm.sh"
    ended = subprocess.run(
        ["bash", script, recipe, "seed=7"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    settings, *words = ended.stdout.splitlines()
    assert settings == "192.0.2.1:6379 64 token"
    separator = words.index("--")
    started, (program, *command) = words[:separator], words[separator + 1 :]
    symmetric = {o for p in ray_cli.commands["symmetric-run"].params for o in p.opts}
    assert started[:3] == ["symmetric-run", "--address", "192.0.2.1:6379"]
    assert {word for word in started if word.startswith("--")} <= symmetric | RAY_START
    assert program == "nemo-rl-mcore"
    options, overrides = parse(command)
    config = load_config(options.config, overrides)
    assert (config.algorithm, config.seed) == (options.command, 7)
    assert (config.cluster.num_nodes, config.cluster.gpus_per_node) == (2, 8)
    limit = re.search(r"^#SBATCH --time=(\d+):00:00$", script.read_text("utf-8"), re.MULTILINE)
    assert limit
    assert seconds_of(config.checkpointing.checkpoint_must_save_by) == int(limit[1]) * 3600 - 900


def test_the_manifest_starts_what_the_recipe_takes():
    manifest = yaml.safe_load((REPO / "docs/clusters/kuberay.yaml").read_text("utf-8"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    cluster = manifest["spec"]["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}" in PROJECT["tool"]["uv"]["constraint-dependencies"]
    (workers,) = cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], workers):
        assert {f"--{name}" for name in group["rayStartParams"]} <= RAY_START
    program, *command = shlex.split(manifest["spec"]["entrypoint"])
    assert program == "nemo-rl-mcore"
    options, overrides = parse(command)
    config = load_config(REPO / "examples/configs" / TWO_MACHINES, overrides)
    assert config.algorithm == options.command
    assert config.cluster.num_nodes == workers["replicas"] == workers["maxReplicas"]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(gpus) == config.cluster.gpus_per_node == int(workers["rayStartParams"]["num-gpus"])
    shared = container["volumeMounts"][0]["mountPath"]
    for folder in (options.config, config.logger.log_dir, config.checkpointing.checkpoint_dir):
        assert folder.startswith(f"{shared}/")
