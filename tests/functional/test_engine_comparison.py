"""A run whose engine computes another function of the same weights ends before it trains, and says where."""

import pytest
from commands import run
from grpo_run import RECIPE
from refusals import assert_holds

pytestmark = pytest.mark.stage("distributed")

OTHER_ROTARY_BASE = """
from dataclasses import replace

from nemo_rl_mcore.driver import run as launch

engine_kind = launch.engine_kind


def with_another_base(config):
    kind = engine_kind(config)
    model = config.policy.model.model_copy(update={"rotary_base": 10.0})
    return replace(kind, settings=replace(kind.settings, policy=config.policy.model_copy(update={"model": model})))


launch.engine_kind = with_another_base
"""


def test_an_engine_with_another_rotary_base_ends_the_run_before_it_trains(tmp_path):
    status, output, errors = run(
        *("grpo", "--config", RECIPE, f"logger.log_dir={tmp_path}"),
        *("policy.generation.colocated.enabled=false", "cluster.cpu_workers_per_node=1"),
        folder=tmp_path,
        first=OTHER_ROTARY_BASE,
    )
    assert status == 1, output + errors
    assert_holds(errors, "the run stopped: engine 0 ", " row ", "policy.generation.compare_at_start")
    assert "engine and training" not in output
    assert (tmp_path / "metrics.jsonl").read_text() == ""
