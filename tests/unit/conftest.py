from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from migrations import migrated_with
from refusals import briefs

from nemo_rl_mcore.config import ConfigError, GRPOMasterConfig, Problem
from nemo_rl_mcore.recipe.load import load_config, load_with_warnings

REPOSITORY = Path(__file__).parents[2]
EXEMPLAR = REPOSITORY / "examples/configs/grpo_copy_cpu.yaml"


@pytest.fixture
def exemplar() -> Path:
    return EXEMPLAR


@pytest.fixture
def tree() -> dict[str, Any]:
    return yaml.safe_load(EXEMPLAR.read_text())


@pytest.fixture
def load() -> Callable[..., GRPOMasterConfig]:
    return lambda *overrides: load_config(EXEMPLAR, overrides)


@pytest.fixture
def wrong() -> Callable[..., tuple[Problem, ...]]:
    """The problems of the exemplar, or of another one, with overrides."""

    def refuse(*overrides: str, recipe: str = EXEMPLAR.name) -> tuple[Problem, ...]:
        with pytest.raises(ConfigError) as caught:
            load_config(EXEMPLAR.with_name(recipe), overrides)
        return caught.value.problems

    return refuse


@pytest.fixture
def refusals(wrong) -> Callable[..., list[str]]:
    return lambda *overrides, **recipe: briefs(wrong(*overrides, **recipe))


@pytest.fixture
def warnings() -> Callable[..., list[str]]:
    """`briefs` of what the exemplar, or another one, gives with overrides that nothing reads."""
    return lambda *overrides, recipe=EXEMPLAR.name: briefs(
        load_with_warnings(EXEMPLAR.with_name(recipe), overrides)[1]
    )


@pytest.fixture
def migrated(tmp_path):
    return lambda changes="", base="grpo_math_1B_megatron": migrated_with(changes, base, tmp_path)
