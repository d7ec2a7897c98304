"""The pages tell the truth: code runs, recipes load, shown output is real, links and paths lead somewhere."""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import BLOCK, PAGES, REPO, blocks, in_backticks, prose
from reference_pages import reference_pages

from nemo_rl_mcore import cli
from nemo_rl_mcore.agents.agents import SESSIONS_FILE
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.driver.observability.recorder import REPORT_FILE
from nemo_rl_mcore.driver.observability.sinks import METRICS_FILE
from nemo_rl_mcore.driver.rollouts.events import EVENTS_FILE
from nemo_rl_mcore.driver.run_folder import RECIPE_FILE
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.recipe.of_nemo_rl import is_foreign
from nemo_rl_mcore.recipe.schema import is_known
from nemo_rl_mcore.tools.evaluate.samples import IDENTITY_FILE, RESULTS_FILE

pytestmark = pytest.mark.stage("docs")

EXEMPLAR = "grpo_copy_cpu.yaml"
EXPERIMENT = "examples/hook_experiment.py"
CONTROLLER, CONTROLLER_PAGE = "examples/split_train_step.py", "docs/split_train_step.md"
# What a run leaves in logger.log_dir, and what the reader is told to write: no files of the repository.
NOT_IN_REPOSITORY = {
    METRICS_FILE,
    REPORT_FILE,
    RECIPE_FILE,
    "rollouts/",
    EVENTS_FILE,
    "tensorboard/",
    "wandb/",
    "mlflow_artifacts/",
    "recipe.json",
    SESSIONS_FILE,
    IDENTITY_FILE,
    RESULTS_FILE,
    "NAME.jsonl",  # of a set of an evaluation
    "results/grpo_copy_cpu/",
    "results/gpu/",
    "worker.py",
    "policy/",  # of a checkpoint, as is
    "groups.1.jsonl",
    "rollouts.jsonl",  # of an earlier version
    "sessions.jsonl",  # of examples/agents_of_others
}


def test_each_block_is_of_a_language_that_is_tested():
    assert {language for text in PAGES.values() for language, _ in BLOCK.findall(text)} == {
        *("python", "yaml", "console"),  # run by the tests below
        "py",  # an agent, which tests/unit/agents/test_clients.py runs
        "bash",  # looked up in test_docs_commands.py
        "text",
    }
    fences = sum(text.count("```") for text in PAGES.values())
    assert fences == 2 * sum(len(BLOCK.findall(text)) for text in PAGES.values())


# Python: the blocks of a page are one script. All scripts share a process, since importing Megatron takes seconds.

RUNNER = """
import runpy, sys
for path in sys.argv[1:]:
    sys.stderr.write(f"running {path}\\n")
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The finished process that ran every page's script, then the experiment; tracebacks show the page's lines."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "examples").symlink_to(REPO / "examples")
    scripts = {}
    for page, line, code in blocks("python"):
        path = folder / f"{page.replace('/', '_')}.py"
        script = scripts.get(path, "")
        scripts[path] = script + "\n" * (line - script.count("\n")) + code
    for path, script in scripts.items():
        path.write_text(script, "utf-8")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    rank = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return subprocess.run(
        [sys.executable, "-c", RUNNER, *map(str, scripts), EXPERIMENT],
        cwd=folder, env=os.environ | rank | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip


def test_python_blocks_run(executed):
    assert len(blocks("python")) >= 6
    assert executed.returncode == 0, executed.stderr[-3000:]


def curves(text):
    rows = re.findall(r"^ +(\d+) +(\d\.\d{4}) +(\d\.\d{4})$", text, re.MULTILINE)
    return [int(step) for step, _, _ in rows], [float(a) for _, a, _ in rows], [float(b) for _, _, b in rows]


def test_the_experiment_prints_what_the_page_shows(executed):
    steps, labels, hook = curves(executed.stdout)
    assert steps == list(range(7))
    assert hook == pytest.approx(labels, abs=2e-4)
    assert hook == sorted(hook, reverse=True)
    page = PAGES["docs/output_processor.md"]
    _, shown_labels, shown_hook = curves(page)
    assert labels == pytest.approx(shown_labels, abs=2e-3)
    assert hook == pytest.approx(shown_hook, abs=2e-3)
    assert f"| `{EXPERIMENT}` | {shown_hook[0]:.4f} | {shown_hook[-1]:.4f} |" in page


def test_the_controller_is_the_file_and_prints_what_its_page_shows(executed):
    code, shown = (text for _, text in BLOCK.findall(PAGES[CONTROLLER_PAGE])[:2])
    assert code == (REPO / CONTROLLER).read_text("utf-8")
    assert len(code.splitlines()) <= 40
    assert shown in executed.stdout


# Recipes and the command


@pytest.mark.parametrize(("page", "line", "text"), blocks("yaml"), ids=lambda value: str(value)[:24])
def test_yaml_blocks_are_recipes(tmp_path, page, line, text):
    for recipe in (REPO / "examples/configs").glob("*.yaml"):
        shutil.copy(recipe, tmp_path)
    block = tmp_path / "block.yaml"
    block.write_text(text if "defaults:" in text else f"defaults: {EXEMPLAR}\n{text}", "utf-8")
    assert load_config(block) != load_config(tmp_path / EXEMPLAR), f"{page}:{line} changes nothing"


@pytest.mark.parametrize(("page", "line", "text"), blocks("console"), ids=lambda value: str(value)[:24])
def test_console_blocks_show_the_real_output(monkeypatch, capsys, page, line, text):
    monkeypatch.chdir(REPO)
    command, _, shown = text.partition("\n")
    program, *arguments = command.removeprefix("$ ").split()
    assert program == "nemo-rl-mcore"
    cli.main(arguments)
    captured = capsys.readouterr()
    assert captured.out + captured.err == shown, f"{page}:{line}"


def test_the_reference_is_generated_from_the_models():
    pages = {Path(page).name: text for page, text in PAGES.items() if page.startswith("docs/reference/")}
    assert pages == reference_pages(), "run: python tests/reference_pages.py docs/reference"


# Names: links, paths, keys


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_resolve():
    found = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", prose(page))]
    assert len(found) > 8
    for page, link in found:
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        path = (REPO / page).parent / target if target else REPO / page
        assert path.is_file(), f"{page} links to {link}"
        assert not anchor or anchor in anchors(str(path.resolve().relative_to(REPO))), (
            f"{page} links to {link}"
        )


def test_every_page_can_be_reached_from_the_readme():
    reached, waiting = set(), ["README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        links = re.findall(r"\]\(([\w/.-]+\.md)", prose(page))
        targets = {os.path.normpath(Path(page).parent / link) for link in links}
        waiting += targets - reached
    assert reached == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    named = set(re.findall(r"\b(?:examples|docs|tests|nemo_rl_mcore)/[\w./-]*\w", PAGES[page]))
    in_ticks = {
        text
        for text in in_backticks(page)
        if re.fullmatch(r"[\w./-]+(/|\.(py|md|ya?ml|jsonl?|png|toml))", text)
    }
    for path in named | in_ticks - NOT_IN_REPOSITORY:
        assert (REPO / path).exists() or (REPO / "nemo_rl_mcore" / path).exists(), f"{page} names {path}"


SECTIONS = (
    "seed|max_consecutive_skips|eval|grpo|ppo|dpo|sft|distillation|value|value_loss_fn|teacher|loss_fn|policy|data|env|"
    "checkpointing|logger|cluster"
)

OF_NEMO_RL = ("docs/migrating.md", "docs/reference/nemo_rl.md")


@pytest.mark.parametrize("page", PAGES)
def test_keys_exist(page):
    for text in in_backticks(page):
        if re.fullmatch(rf"({SECTIONS})\.[\w.]+", text):
            known = any(is_known(text, kind) for kind in RUN_CONFIGS.values())
            foreign = page in OF_NEMO_RL and is_foreign(text)
            assert known or foreign, f"{page} names the key {text}"


def test_identifiers_occur_in_the_package():
    code = ("nemo_rl_mcore", "examples/agents_of_others")
    kinds = {".py", ".yaml"}
    files = (path for folder in code for path in (REPO / folder).rglob("*") if path.suffix in kinds)
    sources = " ".join(path.read_text("utf-8") for path in files)
    words = set(re.findall(r"\w+", sources)) | set(hook_keywords())
    for page in PAGES:
        for text in in_backticks(page):
            if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", text):
                assert text in words, f"{page} names {text}"


def hook_keywords():
    """What GPTModel hands to an output processor, read from the installed source without importing it."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    source = next(
        path.read_text("utf-8")
        for folder in spec.submodule_search_locations or ()
        if (path := Path(folder) / "core/models/gpt/gpt_model.py").is_file()
    )
    call = re.search(r"return output_processor\((.*?)\n {12}\)", source, re.DOTALL)
    assert call is not None
    return re.findall(r"(\w+)=", call[1])


def test_the_hook_page_lists_every_keyword():
    table = (
        PAGES["docs/output_processor.md"].partition("## Arguments of a processor")[2].partition("\n## ")[0]
    )
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(hook_keywords())


def test_no_key_that_ranks_run_with_is_called_never_run():
    """In the table of what runs where, as far as a part is named by its key."""
    rows = [
        line.strip("|").split("|") for line in PAGES["docs/support.md"].splitlines() if line.count("|") == 4
    ]
    never = {key for part, on_cpu, _ in rows if "never run" in on_cpu for key in re.findall(r"`(\w+)`", part)}
    ranks = [path.read_text("utf-8") for path in (REPO / "tests/distributed").glob("test_*.py")]
    assert not [key for key in never if any(f'"{key}": True' in text for text in ranks)]
    assert {"overlap_grad_reduce", "overlap_param_gather"} <= {
        key for part, _, _ in rows for key in re.findall(r"`(\w+)`", part)
    }
