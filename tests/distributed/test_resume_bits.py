"""A run that goes on from a checkpoint is the undisturbed one, bit for bit: every algorithm, however batches are cut.

The runs are those of the meeting matrix, over fewer rows, so that a run passes over its data more than once.
"""

import shutil
from itertools import islice
from pathlib import Path

import meeting_ranks
import pytest
from meeting_recipes import ALGORITHMS, FACTORS, LAYOUTS
from meeting_runs import run
from meetings import Matrix

STEPS, KEPT, ROWS, BATCH = 5, 3, 18, 8
RUN_ON = tuple(name for name, found in ALGORITHMS.items() if found.recipe.parent.name == "configs")
"""Each algorithm; the variants of one take the same rows in the same order."""
PLAIN = {name: values[0] for name, values in FACTORS.items()} | {"state": "resumed", "temperature": 0.7}


@pytest.fixture(scope="module")
def matrix(ranks, tmp_path_factory):
    matrix = Matrix(ranks, tmp_path_factory.mktemp("resumed"), STEPS)
    rows = matrix.folder / "train.jsonl"
    with rows.open() as lines:
        kept = [*islice(lines, ROWS)]
    rows.write_text("".join(kept))
    yield matrix
    matrix.leave()


def outcome(matrix: Matrix, case, folder: Path, **changes):
    """Metrics of each step, and the weights of every model on every rank, of a run that goes on from `folder`."""
    name = ALGORITHMS[case["algorithm"]].shipped.algorithm
    more = {f"{name}__max_num_epochs": STEPS} | changes
    if case["algorithm"] in ("dpo offline", "sft"):
        more["policy__train_global_batch_size"] = BATCH
    config = matrix._load(case, folder, **more)
    pool = matrix._pool(LAYOUTS[case["layout"]][0])
    found = run(config, pool, lambda _model, group: group.run(meeting_ranks.whole_parameters))
    return found.metrics, found.of_models


def case_of(algorithm, batching, layout="one"):
    kl = algorithm not in ("sft", "distillation", "distillation off policy")
    return PLAIN | {"algorithm": algorithm, "batching": batching, "layout": layout, "kl": kl}


def assert_resumes(matrix, case, folder, **changes):
    metrics, weights = outcome(matrix, case, folder / "undisturbed", **changes)
    assert sorted(metrics) == [*range(1, STEPS + 1)]
    (folder / "resumed").mkdir()
    for step in range(1, KEPT + 1):
        shutil.copytree(folder / "undisturbed" / f"step_{step}", folder / "resumed" / f"step_{step}")
    resumed, of_resumed = outcome(matrix, case, folder / "resumed", **changes)
    assert {step: metrics[step] for step in range(KEPT + 1, STEPS + 1)} == resumed
    for model, (of_ranks, wanted_of_ranks) in enumerate(zip(of_resumed, weights, strict=True)):
        for rank, (found, wanted) in enumerate(zip(of_ranks, wanted_of_ranks, strict=True)):
            assert found.keys() == wanted.keys()
            assert not [name for name in wanted if (found[name] != wanted[name]).any()], (model, rank)


@pytest.mark.smoke("sft-packed")
@pytest.mark.quick_cases(
    *(f"dpo offline-{batching}" for batching in FACTORS["batching"]),
    *("sft-packed", "distillation-dynamic", "ppo-packed"),
)
@pytest.mark.parametrize("batching", FACTORS["batching"])
@pytest.mark.parametrize("algorithm", RUN_ON)
def test_a_resumed_run_is_the_undisturbed_one(matrix, tmp_path, algorithm, batching):
    assert_resumes(matrix, case_of(algorithm, batching), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["dp2", "ep2", "tp2 sp", "pp2"])
@pytest.mark.parametrize("batching", FACTORS["batching"])
def test_a_resumed_run_of_given_pairs_on_two_ranks_is_the_undisturbed_one(matrix, tmp_path, batching, layout):
    assert_resumes(matrix, case_of("dpo offline", batching, layout), tmp_path)


@pytest.mark.quick_cases("one")
@pytest.mark.parametrize("layout", ["one", "dp2"])
def test_a_resumed_run_in_bf16_is_the_undisturbed_one_also_of_a_critic(matrix, tmp_path, layout):
    case = case_of("ppo", "fixed", layout) | {"distributed optimizer": True}
    assert_resumes(matrix, case, tmp_path, policy__precision="bfloat16")
