"""Runs over two machines, of which one goes: two in name, each a raylet of this one.

The first machine is Ray's head; what becomes of a run whose head goes is that of a session that is lost.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from select import select

import pytest
from checkpoint_tensors import tensors_in
from grpo_run import RECIPE, Run
from raylets import Raylets
from refusals import assert_holds

STEPS, PERIOD, GONE_AFTER = 7, 3, 5
ASYNCHRONOUS = RECIPE.with_name("grpo_copy_async_cpu.yaml")
CLOCKS = ("timing/", "performance/", "recovery/")
SMALL = (
    *(f"grpo.max_num_steps={STEPS}", "grpo.val_at_end=false", "logger.tensorboard_enabled=false"),
    *("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=8"),
    *("policy.train_global_batch_size=64", "policy.train_micro_batch_size=32"),
    *("checkpointing.enabled=true", f"checkpointing.save_period={PERIOD}", "checkpointing.keep_top_k=1"),
    "cluster.max_trainer_restarts=1",
)
TWO_MACHINES = ("cluster.num_nodes=2", "cluster.cpu_workers_per_node=1")
TOLD_WITHIN_S = 4.0
"""It takes about 1.5; Ray itself knows after five missed health checks, which is 12 seconds or more."""

Start = Callable[..., Run]


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    with Raylets() as head:
        yield head


@pytest.fixture
def second(raylets: Raylets) -> Iterator[str]:
    """The address of a second machine; none that has joined is left after the test."""
    yield raylets.join()
    raylets.kill_joined()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Run] = []

    def run(
        name: str, *overrides: str, environment: dict[str, str] | None = None, recipe: Path = RECIPE
    ) -> Run:
        folder = tmp_path / name
        with pytest.MonkeyPatch.context() as patch:
            for key, value in (environment or {}).items():
                patch.setenv(key, value)
            saved = f"checkpointing.checkpoint_dir={folder}/saved"
            started.append(Run(folder, *SMALL, saved, *overrides, recipe=recipe))
        return started[-1]

    yield run
    for one in started:
        one.close()


def numbers(run: Run) -> list[dict[str, float]]:
    return [{name: v for name, v in row.items() if not name.startswith(CLOCKS)} for row in run.steps()]


def last_checkpoint(run: Run) -> dict[str, object]:
    return tensors_in(run.log_dir / "saved" / f"step_{STEPS}" / "policy")


def lose(raylets: Raylets, address: str, run: Run) -> None:
    """Kill a machine in mid-run."""
    run.wait_for_step(GONE_AFTER, within_s=240)
    raylets.kill(address)


@pytest.mark.nightly
def test_a_machine_in_place_of_one_that_is_gone(raylets: Raylets, second: str, start: Start) -> None:
    """The run waits for it, and ends as one on a single machine that nothing befell: bit for bit."""
    undisturbed = start("undisturbed", "cluster.cpu_workers_per_node=2")
    assert undisturbed.end(within_s=300)[0] == 0
    struck = start("struck", *TWO_MACHINES, "cluster.node_wait_s=120", environment=raylets.environment)
    lose(raylets, second, struck)
    raylets.join()
    code, _, errors = struck.end(within_s=300)
    assert code == 0, errors
    assert_holds(errors, f"({second}) is gone; ", "checkpoint of step 3, 0 left", "trained again")
    assert "differ" not in errors
    assert numbers(struck) == numbers(undisturbed)
    wanted, found = last_checkpoint(undisturbed), last_checkpoint(struck)
    assert wanted.keys() == found.keys()
    assert not [name for name in wanted if not wanted[name].equal(found[name])]


@pytest.mark.nightly
def test_the_end_where_all_machines_are_needed(raylets: Raylets, second: str, start: Start) -> None:
    run = start("run", *TWO_MACHINES, "cluster.node_wait_s=2", environment=raylets.environment)
    lose(raylets, second, run)
    code, _, errors = run.end(within_s=200)
    assert code == 1
    keys = "(cluster.num_nodes)", "cluster.node_wait_s"
    assert_holds(errors, "the run stopped: 1 of 2 machines ", *keys, "the same command")


@pytest.mark.nightly
def test_sampling_beside_training_over_two_machines(raylets: Raylets, second: str, start: Start) -> None:
    """Engines on the machine that is gone restart on another one."""
    generation = ("engines=2", "max_restarts=2")
    overrides = tuple(f"policy.generation.embedded_cfg.{key}" for key in generation)
    run = start(
        "run",
        *(*TWO_MACHINES, *overrides, "cluster.node_wait_s=120"),
        environment=raylets.environment,
        recipe=ASYNCHRONOUS,
    )
    lose(raylets, second, run)
    raylets.join()
    code, _, errors = run.end(within_s=300)
    assert code == 0, errors
    assert_holds(errors, f"({second}) is gone; ", "checkpoint of step 3, 0 left")
    assert [row["step"] for row in run.steps()] == [*range(1, STEPS + 1)]


@pytest.mark.nightly
def test_it_is_told_before_ray_knows(raylets: Raylets, second: str, start: Start) -> None:
    run = start("run", *TWO_MACHINES, environment=raylets.environment)
    lose(raylets, second, run)
    assert run.process.stderr is not None
    assert select([run.process.stderr], [], [], TOLD_WITHIN_S)[0], f"nothing was told in {TOLD_WITHIN_S} s"
    assert f"({second}) is gone; " in run.process.stderr.readline()
