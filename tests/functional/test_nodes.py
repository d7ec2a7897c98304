"""A run over two machines, of which one goes: two in name, each a raylet of this one; see also the kill table."""

from collections.abc import Iterator

import pytest
from raylets import Raylets
from refusals import assert_holds

STEPS, PERIOD, GONE_AFTER = 7, 3, 5
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


@pytest.mark.nightly
def test_the_end_where_all_machines_are_needed(raylets: Raylets, second: str, start) -> None:
    wait = "from nemo_rl_mcore.driver.actors import cluster; cluster.NODE_WAIT_S = 2.0; "
    run = start("run", *SMALL, *TWO_MACHINES, environment=raylets.environment, before=wait)
    run.wait_for_step(GONE_AFTER, within_s=240)
    raylets.kill(second)
    code, _, errors = run.end(within_s=200)
    assert code == 1
    assert_holds(
        errors, "the run stopped: 1 of 2 machines ", "(cluster.num_nodes)", "2 s", "the same command"
    )
