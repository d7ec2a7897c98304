"""What run.sh and common.env do, with a package of one file in the place of nemo_rl_mcore."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stage("docs")

SUITES = Path(__file__).parents[2] / "test_suites"
FAKE_PACKAGE = """
import json, os, sys, time
from pathlib import Path

command, *arguments = sys.argv[1:]
options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
with open("calls.jsonl", "a") as calls:
    calls.write(json.dumps({"command": command, "arguments": arguments}) + "\\n")
if command == "check":
    sys.exit()
if options.get("behaviour") == "hang":
    time.sleep(60)
log_dir = Path(options["logger.log_dir"])
log_dir.mkdir(parents=True, exist_ok=True)
metrics = log_dir / "metrics.jsonl"
done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
last = int(options[f"{command}.max_num_steps"])
with metrics.open("a") as rows:
    for step in range(done + 1, last + 1):
        rows.write(json.dumps({"step": step, "train/loss": 1 / step}) + "\\n")
print(f"ran to step {last}")
sys.exit(3 if options.get("behaviour") == "fail" else 0)
"""


class Project:
    """A copy of the scripts, in a project whose command writes its calls to calls.jsonl."""

    def __init__(self, root: Path) -> None:
        self.root, self.results = root, root / "elsewhere"
        self.suites = root / "tests/test_suites"
        (self.suites / "llm").mkdir(parents=True)
        for name in ("run.sh", "check_metrics.py", "dump_metrics.py", "llm/common.env"):
            shutil.copy(SUITES / name, self.suites / name)
        package = root / "nemo_rl_mcore"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(FAKE_PACKAGE)

    def add(
        self, stem: str, *, steps: int = 2, per_run: int = 2, check: str = 'max(data["train/loss"]) == 1'
    ):
        script = self.suites / f"llm/{stem}.sh"
        script.write_text(
            f"""source "$(dirname -- "${{BASH_SOURCE[0]}}")/common.env"
STEPS_PER_RUN={per_run}
MAX_STEPS={steps}
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN))
NUM_MINUTES=1
run_recipe "$@"
check_metrics '{check}'
"""
        )
        with (self.suites / "suite.txt").open("a") as suite:
            suite.write(f"\n# a comment\ntests/test_suites/llm/{stem}.sh  # another one\n")

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(self.suites / "run.sh"), *arguments],
            env={
                **os.environ,
                "PYTHON": f"{sys.executable} -B",
                "RESULTS_DIR": str(self.results),
                **environment,
            },
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[dict[str, object]]:
        path = self.root / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def last_steps(self) -> list[str]:
        return [
            argument.partition("=")[2]
            for call in self.calls()
            for argument in call["arguments"]
            if argument.startswith(f"{call['command']}.max_num_steps=")
        ]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_a_run_that_passes_leaves_its_log_and_its_metrics(project):
    project.add("sft-task-1n0g-plain")
    done = project.run("suite.txt", "--", "seed=7", "+extra=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("sft-task-1n0g-plain  pass\n0 of 1 failed\n")
    (call,) = project.calls()
    folder = project.results / "sft-task-1n0g-plain"
    assert call == {
        "command": "sft",
        "arguments": [
            "--config",
            str(project.root / "examples/configs/recipes/llm/sft-task-1n0g-plain.yaml"),
            "sft.max_num_steps=2",
            f"logger.log_dir={folder}/logs",
            "checkpointing.enabled=false",
            f"checkpointing.checkpoint_dir={folder}/ckpts",
            "seed=7",
            "+extra=1",
        ],
    }
    assert (folder / "run.log").read_text() == "ran to step 2\n"
    assert json.loads((folder / "metrics.json").read_text()) == {"train/loss": {"1": 1.0, "2": 0.5}}


def test_what_fails_is_named_and_what_follows_still_runs(project):
    project.add("grpo-a-1n0g-plain", check='max(data["train/loss"]) < 1')
    project.add("grpo-b-1n0g-plain")
    done = project.run("suite.txt")
    assert done.returncode == 1
    assert "grpo-a-1n0g-plain  FAIL (exit status 1)\n" in done.stdout
    assert done.stdout.endswith("grpo-b-1n0g-plain  pass\n1 of 2 failed\n")


def test_a_run_that_fails_is_not_checked(project):
    project.add("grpo-a-1n0g-plain")
    done = project.run("suite.txt", "--", "behaviour=fail")
    assert done.returncode == 1
    assert "FAIL (exit status 3)" in done.stdout
    assert not (project.results / "grpo-a-1n0g-plain/metrics.json").exists()


def test_a_run_that_hangs_is_stopped(project):
    project.add("grpo-a-1n0g-plain")
    done = project.run("suite.txt", "--", "behaviour=hang", TIME_LIMIT_MINUTES="0.01")
    assert done.returncode == 1
    assert "[ERROR] the run was stopped after its 0.01 minutes" in done.stdout
    assert "FAIL (exit status 124)" in done.stdout


def test_several_runs_go_on_where_the_one_before_stopped(project):
    project.add("dpo-a-1n0g-plain", steps=5, per_run=2)
    assert project.run("suite.txt").returncode == 0
    assert project.last_steps() == ["2", "4", "5"]
    assert all("checkpointing.enabled=true" in call["arguments"] for call in project.calls())


def test_a_second_call_goes_on_and_a_third_only_checks(project):
    project.add("dpo-a-1n0g-plain", steps=5, per_run=2)
    assert project.run("suite.txt", "--", "behaviour=fail").returncode == 1
    assert project.last_steps() == ["2"]
    assert project.run("suite.txt").returncode == 0
    assert project.last_steps() == ["2", "4", "5"]
    done = project.run("suite.txt")
    assert done.returncode == 0
    assert "all 5 steps are done" in done.stdout
    assert "pass    max(" in done.stdout
    assert len(project.calls()) == 3


def test_a_dry_run_checks_and_runs_nothing(project):
    project.add("grpo-a-1n0g-plain", check="1 < 2 or 2 < 1")
    done = project.run("--dry-run", "suite.txt")
    assert done.returncode == 1
    assert [call["command"] for call in project.calls()] == ["check"]
    assert "BoolOp at column 1 is not a comparison" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a suite"),
        (("missing.txt",), "missing.txt"),
        (("--fast", "suite.txt"), "unknown option --fast"),
        (("empty.txt",), "no scripts"),
    ],
)
def test_wrong_calls_are_refused(project, arguments, message):
    project.add("grpo-a-1n0g-plain")
    (project.suites / "empty.txt").write_text("# nothing\n")
    done = project.run(*arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert project.calls() == []
