import pytest
from refusals import checked_run, wrong_key

from nemo_rl_mcore.config import GRPOMasterConfig
from nemo_rl_mcore.config.cluster import seconds_of
from nemo_rl_mcore.data.datasets import DigitTaskSource


@pytest.mark.parametrize(
    ("task", "digits"),
    [
        *(("copy", digits) for digits in (1, 2, 3, 4)),
        ("calculator", 2),
        ("calculator", 4),
        ("guess_number", 2),
    ],
)
def test_the_prompts_that_the_config_promises_exist(load, task, digits):
    data = load().data.model_copy(update={"num_digits": digits, "dataset_name": task})
    source = DigitTaskSource(task, digits, seed=0)
    few = min(data.task.train_prompts, 2000)
    held_out = data.task.validation_prompts
    assert len(source.validation(held_out)) == held_out >= (digits > 1)
    assert len(source.train_batch(1, few)) == few
    assert {len(prompt.text) for prompt in source.train_batch(1, few)} == {data.task.prompt_length}


def test_ranks_are_gpus_where_there_are_any(load):
    config = load(
        "cluster.gpus_per_node=4", "policy.train_micro_batch_size=64", "policy.logprob_batch_size=64"
    )
    assert (config.cluster.world_size, config.data_parallel_size) == (4, 4)
    assert load("policy.megatron_cfg.tensor_model_parallel_size=2").data_parallel_size == 1


def test_rules_hold_without_the_loader(tree):
    tree["policy"]["train_global_batch_size"] = 100
    with wrong_key("policy.train_global_batch_size: not-divisible (num_prompts_per_step)"):
        checked_run(GRPOMasterConfig, tree)


def test_a_limit_of_time_is_read_as_days_hours_minutes_and_seconds(load):
    config = load("checkpointing.enabled=true", "checkpointing.checkpoint_must_save_by=01:02:03:04")
    assert seconds_of(config.checkpointing.checkpoint_must_save_by) == 93784
    assert seconds_of(load().checkpointing.checkpoint_must_save_by) is None
