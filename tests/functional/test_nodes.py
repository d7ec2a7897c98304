"""Runs over two machines, of which one goes: two in name, each a raylet of this one."""

from collections.abc import Iterator

import pytest
from grpo_run import RECIPE, Run
from raylets import Raylets
from refusals import assert_holds

STEPS, PERIOD, GONE_AFTER = 7, 3, 5
ASYNCHRONOUS = RECIPE.with_name("grpo_copy_async_cpu.yaml")
SMALL = (
    *(f"grpo.max_num_steps={STEPS}", "grpo.val_at_end=false", "logger.tensorboard_enabled=false"),
    *("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=8"),
    *("policy.train_global_batch_size=64", "policy.train_micro_batch_size=32"),
    *("checkpointing.enabled=true", f"checkpointing.save_period={PERIOD}", "checkpointing.keep_top_k=1"),
    "cluster.max_trainer_restarts=1",
)
TWO_MACHINES = ("cluster.num_nodes=2", "cluster.cpu_workers_per_node=1")


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    with Raylets() as head:
        yield head


@pytest.fixture
def second(raylets: Raylets) -> Iterator[str]:
    """The address of a second machine; none that has joined is left after the test."""
    yield raylets.join()
    raylets.kill_joined()


def lose(raylets: Raylets, address: str, run: Run) -> None:
    """Kill a machine in mid-run."""
    run.wait_for_step(GONE_AFTER, within_s=240)
    raylets.kill(address)


@pytest.mark.nightly
def test_the_end_where_all_machines_are_needed(raylets: Raylets, second: str, start) -> None:
    run = start("run", *SMALL, *TWO_MACHINES, "cluster.node_wait_s=2", environment=raylets.environment)
    lose(raylets, second, run)
    code, _, errors = run.end(within_s=200)
    assert code == 1
    keys = "(cluster.num_nodes)", "cluster.node_wait_s"
    assert_holds(errors, "the run stopped: 1 of 2 machines ", *keys, "the same command")


@pytest.mark.nightly
def test_sampling_beside_training_over_two_machines(raylets: Raylets, second: str, start) -> None:
    """Engines on the machine that is gone restart on another one."""
    generation = ("engines=2", "max_restarts=2")
    overrides = tuple(f"policy.generation.{key}" for key in generation)
    run = start(
        "run",
        *(*SMALL, *TWO_MACHINES, *overrides, "cluster.node_wait_s=120"),
        environment=raylets.environment,
        recipe=ASYNCHRONOUS,
    )
    lose(raylets, second, run)
    raylets.join()
    code, _, errors = run.end(within_s=300)
    assert code == 0, errors
    assert_holds(errors, f"({second}) is gone; ", "checkpoint of step 3, 0 left")
    assert [row["step"] for row in run.steps()] == [*range(1, STEPS + 1)]
