import pytest
from refusals import checked_run, wrong_key

from nemo_rl_mcore.config import GRPOMasterConfig
from nemo_rl_mcore.config.cluster import seconds_of
from nemo_rl_mcore.data.datasets import DigitTaskSource, is_held_out


def held_out(digits: int) -> int:
    return sum(is_held_out(f"{number:0{digits}d}>") for number in range(10**digits))


@pytest.mark.parametrize("digits", [1, 2, 3, 4])
def test_the_prompts_that_the_config_promises_exist(load, digits):
    data = load().data.model_copy(update={"num_digits": digits})
    assert data.task.validation_prompts <= held_out(digits)
    assert data.task.train_prompts <= 10**digits - held_out(digits)


@pytest.mark.parametrize(("task", "digits"), [("calculator", 2), ("calculator", 4), ("guess_number", 2)])
def test_the_prompts_of_several_turns_that_the_config_promises_exist(load, task, digits):
    data = load().data.model_copy(update={"num_digits": digits, "dataset_name": task})
    source = DigitTaskSource(task, digits, seed=0)
    few = min(data.task.train_prompts, 2000)
    assert len(source.validation(data.task.validation_prompts)) == data.task.validation_prompts > 0
    assert len(source.train_batch(1, few)) == few
    assert {len(prompt.text) for prompt in source.validation(5)} == {data.task.prompt_length}


THREE_RANKS = ["policy.megatron_cfg.pipeline_model_parallel_size=3", "cluster.cpu_workers_per_node=3"]


def test_stages_may_have_numbers_of_layers_of_their_own(load):
    """The largest one is that of `check`'s memory."""
    keys = ("first", 1), ("last", 1)
    own = [f"policy.megatron_cfg.num_layers_in_{end}_pipeline_stage={layers}" for end, layers in keys]
    for given, largest in ((own, 4), (own[:1], 3)):
        layers = 6 if len(given) == 2 else 7
        megatron = load(*THREE_RANKS, *given, f"policy.model.num_layers={layers}").policy.megatron_cfg
        assert megatron.largest_stage(layers) == largest


def test_ranks_are_gpus_where_there_are_any(load):
    config = load(
        "cluster.gpus_per_node=4", "policy.train_micro_batch_size=64", "policy.logprob_batch_size=64"
    )
    assert (config.cluster.world_size, config.data_parallel_size) == (4, 4)
    assert load("policy.megatron_cfg.tensor_model_parallel_size=2").data_parallel_size == 1


@pytest.mark.parametrize("seed", [0, 2**31 - 1])
def test_the_ends_of_the_range_of_seeds_are_seeds(load, seed):
    assert load(f"seed={seed}").seed == seed


def test_rules_hold_without_the_loader(tree):
    tree["policy"]["train_global_batch_size"] = 100
    with wrong_key("policy.train_global_batch_size: not-divisible (num_prompts_per_step)"):
        checked_run(GRPOMasterConfig, tree)


def test_a_limit_of_time_is_read_as_days_hours_minutes_and_seconds(load):
    config = load("checkpointing.enabled=true", "checkpointing.checkpoint_must_save_by=01:02:03:04")
    assert seconds_of(config.checkpointing.checkpoint_must_save_by) == 93784
    assert seconds_of(load().checkpointing.checkpoint_must_save_by) is None
