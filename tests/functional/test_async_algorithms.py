"""Asynchronous runs of every algorithm at age 0 are the synchronous run to the bit."""

from pathlib import Path

import pytest
from checkpoint_tensors import tensors_in
from grpo_run import RECIPE, Run, compared, teacher

STEPS = 5
CONFIGS = RECIPE.parent
EXHAUSTIVE, NIGHTLY = pytest.mark.exhaustive, pytest.mark.nightly


@pytest.mark.parametrize(
    ("algorithm", "recipe", "overrides", "models"),
    [
        pytest.param(
            "grpo", "grpo_copy_async_cpu", ("policy.train_global_batch_size=128",), ("policy",), marks=NIGHTLY
        ),
        pytest.param(
            "grpo", "grpo_copy_async_cpu", ("grpo.use_dynamic_sampling=true",), ("policy",), marks=EXHAUSTIVE
        ),
        pytest.param("ppo", "ppo_async_cpu", (), ("policy", "value"), marks=EXHAUSTIVE),
        pytest.param("dpo", "dpo_async_cpu", (), ("policy",), marks=NIGHTLY),
        pytest.param("distillation", "distillation_async_cpu", (), ("policy",), marks=NIGHTLY),
    ],
    ids=["two optimizer steps", "dynamic sampling", "ppo", "dpo", "distillation"],
)
def test_at_age_0_a_run_is_the_synchronous_one_to_the_bit(
    tmp_path: Path, algorithm: str, recipe: str, overrides: tuple[str, ...], models: tuple[str, ...]
) -> None:
    section = f"{algorithm}.async_{algorithm}"
    learns_from = (teacher(tmp_path),) if algorithm == "distillation" else ()
    common = (
        *(f"{algorithm}.max_num_steps={STEPS}", f"checkpointing.save_period={STEPS}"),
        *(f"{algorithm}.val_at_end=false", *overrides, *learns_from),
    )
    turns = (f"{section}.enabled=false", "policy.generation.colocated.enabled=true")
    beside = (f"{section}.max_trajectory_age_steps=0",)
    found = []
    for name, how in (("turns", turns), ("beside", beside)):
        path = CONFIGS / f"{recipe}.yaml"
        run = Run(tmp_path / name, *common, *how, algorithm=algorithm, recipe=path)
        try:
            code, _, errors = run.end(within_s=300)
        finally:
            run.close()
        assert (code, errors) == (0, "")
        saved = run.log_dir / "checkpoints" / f"step_{STEPS}"
        tensors = {
            f"{model} {key}": value for model in models for key, value in tensors_in(saved / model).items()
        }
        found.append((compared(run), tensors))
        if how is beside:
            assert {row["async/age_max"] for row in run.steps()} == {0}
    (rows, wanted), (others, tensors) = found
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert rows == others
    assert wanted.keys() == tensors.keys()
    assert not [name for name in wanted if not wanted[name].equal(tensors[name])]
