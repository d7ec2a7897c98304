import pytest
from grpo_run import Run


@pytest.fixture
def start(tmp_path):
    """`start(name, *overrides, **keys)`: a run in a folder of that name, with its checkpoints."""
    started = []

    def run(name, *overrides, **keys):
        folder = f"checkpointing.checkpoint_dir={tmp_path / name / 'checkpoints'}"
        started.append(Run(tmp_path / name, folder, "logger.tensorboard_enabled=false", *overrides, **keys))
        return started[-1]

    yield run
    for one in started:
        one.close()
