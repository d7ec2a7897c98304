import math

import plotly.graph_objects as go
import pytest
from run_folder import rows, write_run

from nemo_rl_mcore.tools.report import read_run
from nemo_rl_mcore.tools.report.figures import (
    _MOST_POINTS,
    curve_groups,
    other_metrics,
    stacked_phases,
    waterfall,
)
from nemo_rl_mcore.tools.report.run_data import RunData


def run_of(tmp_path, metrics, name="run"):
    return RunData(tmp_path / name, [{"step": float(step), **row} for step, row in enumerate(metrics, 1)])


def panels(runs):
    return {panel["title"]: panel["figure"] for group in curve_groups(runs) for panel in group["panels"]}


def validated(figure):
    """By Plotly's own schema; `run` is the page's."""
    data = [{name: value for name, value in trace.items() if name != "run"} for trace in figure["data"]]
    return go.Figure({**figure, "data": data})


def test_every_figure_is_one_of_plotly_s_schema(tmp_path):
    run = read_run(write_run(tmp_path / "run", rows(30, **{"a/b": 1.0, "train/entropy": math.nan})))
    figures = [*panels([run]).values(), *other_metrics([run]).values()]
    figures += [waterfall(run.rows), stacked_phases(run.rows)]
    assert len(figures) == 9
    for figure in figures:
        validated(figure)


def test_values_that_are_not_finite_are_gaps(tmp_path):
    run = run_of(tmp_path, rows(30, **{"train/loss": lambda step: math.inf if step == 2 else 1 / 3}))
    assert panels([run])["train/loss"]["data"][0]["y"][:3] == [0.333333, None, 0.333333]


def test_a_long_curve_is_thinned_and_keeps_its_spikes(tmp_path):
    spike = 12_345
    metrics = rows(
        20_001, **{"train/loss": lambda step: 99.0 if step == spike else 0.0 if step == 7 else 1.0}
    )
    run = run_of(tmp_path, metrics)
    [trace] = panels([run])["train/loss"]["data"]
    assert len(trace["x"]) <= 2 * _MOST_POINTS
    assert [step for step, value in zip(trace["x"], trace["y"], strict=True) if value != 1.0] == [7, spike]
    assert max(len(area["x"]) for area in stacked_phases(run.rows)["data"]) <= _MOST_POINTS


def test_runs_beside_each_other_share_panels_and_have_their_names(tmp_path):
    runs = [run_of(tmp_path, rows(count), name) for count, name in ((30, "one"), (40, "other"))]
    figure = panels(runs)["train/reward"]
    assert [trace["name"] for trace in figure["data"]] == ["one: train/reward", "other: train/reward"]
    assert [trace["run"] for trace in figure["data"]] == [0, 1]
    assert figure["layout"]["xaxis"]["range"] == [0, 40]


def test_the_waterfall_is_the_median_step_and_adds_up(tmp_path):
    metrics = rows(5, **{"timing/train": lambda step: 0.25 if step < 5 else 0.4})
    figure = waterfall(run_of(tmp_path, metrics).rows)
    [bar] = figure["data"]
    assert dict(zip(bar["y"], bar["x"], strict=True)) == {
        "generation": 0.5,
        "training": 0.25,
        "the rest": 0.25,
    }
    assert bar["base"] == [0.0, 0.5, 0.75]


def test_generation_beside_training_is_told_as_waiting(tmp_path):
    run = run_of(tmp_path, rows(5, **{"async/trainer_idle": 0.5}))
    assert waterfall(run.rows)["data"][0]["y"] == ["waiting for answers", "training", "the rest"]


def test_seconds_that_are_not_finite_are_left_out(tmp_path):
    columns = dict.fromkeys(("timing/total", "timing/train"), lambda step: math.nan if step == 2 else 1.0)
    [bar] = waterfall(run_of(tmp_path, rows(5, **columns | {"timing/generation": 0.0})).rows)["data"]
    assert dict(zip(bar["y"], bar["x"], strict=True)) == {"training": 1.0}


@pytest.mark.parametrize("metrics", [[], [{"train/loss": 1.0}], [{"timing/total": 0.0}]])
def test_a_run_without_times_has_no_waterfall(tmp_path, metrics):
    assert waterfall(run_of(tmp_path, metrics).rows) is None


def test_metrics_without_a_panel_can_be_chosen(tmp_path):
    metrics = rows(3, **{"a/b": 1.0, "timing/train_cpu": 1.0, "timing/startup/ray": 5.0})
    others = other_metrics([run_of(tmp_path, metrics)])
    assert list(others) == ["a/b", "timing/generation", "timing/train"]


@pytest.mark.parametrize("value", [0.001, -3.0, 1e6, 0.0])
def test_a_constant_curve_has_an_axis_around_its_value(tmp_path, value):
    figure = panels([run_of(tmp_path, rows(30, **{"train/lr": value, "train/loss": float}))])
    low, high = figure["train/lr"]["layout"]["yaxis"]["range"]
    assert low < value < high
    assert high - low <= abs(value) or not value
    assert (low > 0) == (value > 0)
    assert "yaxis" not in figure["train/loss"]["layout"]
    validated(figure["train/lr"])
