"""Microbatches and log-probability passes that do not divide a rank's samples train what dividing ones train."""

import pytest
import torch
from checkpoint_tensors import tensors_in
from grpo_run import Run

pytestmark = pytest.mark.stage("exhaustive")

STEPS = 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The tensors of two steps with two ranks of 128 samples each."""

    def train(*overrides):
        folder = tmp_path_factory.mktemp("run")
        run = Run(
            *(folder, f"grpo.max_num_steps={STEPS}", "grpo.val_at_end=false", "checkpointing.enabled=true"),
            *(
                f"checkpointing.checkpoint_dir={folder}/saved",
                "loss_fn.reference_policy_kl_penalty=0.01",
                *overrides,
            ),
        )
        status, output, errors = run.end(within_s=240)
        assert status == 0, output + errors
        return tensors_in(folder / "saved" / f"step_{STEPS}" / "policy")

    return train


@pytest.fixture(scope="module")
def dividing(trained):
    return trained()


@pytest.mark.parametrize(
    "budgets",
    [(), pytest.param(("+policy.dynamic_batching.enabled=true",), marks=pytest.mark.nightly)],
    ids=["rows", "tokens"],
)
def test_sizes_that_do_not_divide_give_the_weights_of_those_that_do(trained, dividing, budgets):
    given = trained("policy.train_micro_batch_size=48", "policy.logprob_batch_size=48", *budgets)
    weights = [name for name in dividing if name.startswith("weights ")]
    start = {name: dividing[name.replace("weights", "reference", 1)] for name in weights}
    assert max((dividing[name] - start[name]).abs().max() for name in weights) > 1e-3
    for name in weights:
        torch.testing.assert_close(given[name], dividing[name], rtol=0, atol=5e-5)
