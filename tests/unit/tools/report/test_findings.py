import math
import random

import pytest
from run_folder import rows

from nemo_rl_mcore.tools.report.page import findings_of
from nemo_rl_mcore.tools.report.run_data import RunData


def found(metrics, tmp_path, **known):
    numbered = [{"step": float(step), **row} for step, row in enumerate(metrics, 1)]
    return findings_of(RunData(tmp_path, numbered, **known))


def test_a_healthy_run_gives_no_finding(tmp_path):
    healthy = {
        **{"train/entropy": lambda step: 3 - step / 50, "train/kl_penalty": 0.01, "train/grad_norm": 1.0},
        **{
            "train/token_mult_prob_error": 1.002,
            "train/truncation_rate": 0.05,
            "train/probs_ratio_clipfrac": 0.1,
        },
        **{
            "async/ess": 0.97,
            "async/trainer_idle": 0.1,
            "async/engine_idle": 0.2,
            "train/skipped_steps": 0.0,
        },
        **{"train/reward_min": 0.0, "train/reward_max": 1.0},
    }
    assert found(rows(40, **healthy), tmp_path) == []


LATE = {"steps": lambda value, before=1.0: lambda step: before if step <= 20 else value}["steps"]


@pytest.mark.parametrize(
    ("columns", "words", "panel"),
    [
        ({"train/entropy": LATE(0.05, 3.0)}, "Entropy has collapsed, from 3 to 0.05", "train/entropy"),
        (
            {"train/token_mult_prob_error": LATE(1.2)},
            "by a factor of up to 1.2 per token",
            "train/token_mult_prob_error",
        ),
        ({"train/reward": LATE(0.1, 0.9)}, "was 0.9 at step 10 and is 0.1 now", "train/reward"),
        ({"validation/reward": LATE(0.1, 0.9)}, "was 0.9 at step 1 and is 0.1 now", "validation/reward"),
        ({"train/truncation_rate": LATE(0.6)}, "60% of the answers", "train/truncation_rate"),
        ({"train/loss": lambda step: math.nan if step == 7 else 1.0}, "not finite in step 7:", "train/loss"),
        ({"train/skipped_steps": 3.0}, "3 steps had no update", "train/grad_norm"),
        (
            {"train/reward_min": 0.0, "train/reward_max": 0.0},
            "last 40 steps have the same reward, 0",
            "train/reward_std",
        ),
        ({"async/ess": LATE(0.3)}, "effective sample of only 30%", "async/ess"),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" in value else "",
)
def test_each_rule_tells_of_its_case(tmp_path, columns, words, panel):
    findings = found(rows(40, **columns), tmp_path)
    assert [finding.panel for finding in findings] == [panel]
    assert words in findings[0].text


def test_a_task_that_is_learnt_leaves_nothing_to_explore(tmp_path):
    columns = {"train/entropy": LATE(0.05, 3.0), "train/reward": LATE(1.0, 0.1)}
    extremes = {"train/reward_min": LATE(1.0, 0.0), "train/reward_max": 1.0}
    assert found(rows(40, **columns, **extremes), tmp_path) == []


def test_a_cost_that_has_become_nothing_is_learnt(tmp_path):
    columns = {"train/entropy": LATE(0.05, 3.0), "train/reward": LATE(-0.02, -0.9)}
    assert found(rows(40, **columns, **{"train/reward_min": -1.0, "train/reward_max": 0.0}), tmp_path) == []


def test_a_reward_that_is_not_finite_has_not_fallen(tmp_path):
    assert (
        found(rows(40, **{"train/reward": lambda step: math.nan if step == 1 else step / 40}), tmp_path) == []
    )


def test_noise_is_no_fall(tmp_path):
    """Of a reward that stays where it is, its best is always above its last."""
    noise = random.Random(1)
    for _ in range(20):
        assert found(rows(60, **{"train/reward": lambda _: noise.gauss(0.5, 0.05)}), tmp_path) == []
        assert found(rows(60, **{"validation/reward": lambda _: noise.gauss(0.5, 0.01)}), tmp_path) == []


def test_a_run_that_has_no_step_is_told(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    [finding] = found([], tmp_path, recipe={"sft": {"max_num_steps": 40}})
    assert finding.text == "The run has 0 of 40 steps. Is it still running?"


def test_steps_that_are_no_number_are_no_trouble(tmp_path):
    assert found(rows(2), tmp_path, recipe={"sft": {"max_num_steps": "many"}}) == []


def test_answers_of_older_weights_are_no_mismatch(tmp_path):
    columns = {"train/token_mult_prob_error": 1.2, "async/age_max": LATE(1.0, 0.0)}
    [finding] = found(rows(40, **columns), tmp_path)
    assert "in 20 of 20 steps" in finding.text
    assert found(rows(40, **columns | {"async/age_max": 1.0}), tmp_path) == []


def test_a_run_that_has_not_all_its_steps_is_told(tmp_path):
    recipe = {"grpo": {"max_num_steps": 40}}
    [finding] = found(rows(19), tmp_path, recipe=recipe)
    assert finding.text.startswith("The run has 19 of 40 steps")
    assert found(rows(40), tmp_path, recipe=recipe) == []


@pytest.mark.parametrize("count", [0, 1, 2])
def test_hardly_any_steps_are_no_trouble(tmp_path, count):
    columns = {
        "train/entropy": 1.0,
        "train/grad_norm": math.nan,
        "async/ess": math.nan,
        "validation/reward": 0.5,
    }
    assert len(found(rows(count, **columns), tmp_path)) == (count > 0)
