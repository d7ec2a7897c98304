import pytest

from nemo_rl_mcore.config import GRPOMasterConfig, checked
from nemo_rl_mcore.data.datasets import DigitTaskSource, is_held_out

SHRINKING = (
    "cluster.elastic=shrink",
    "cluster.num_nodes=2",
    "cluster.max_trainer_restarts=1",
    "checkpointing.enabled=true",
)


def held_out(digits: int) -> int:
    return sum(is_held_out(f"{number:0{digits}d}>") for number in range(10**digits))


@pytest.mark.parametrize("digits", [1, 2, 3, 4])
def test_the_prompts_that_the_config_promises_exist(load, digits):
    data = load().data.model_copy(update={"num_digits": digits})
    assert data.validation_prompts <= held_out(digits)
    assert data.train_prompts <= 10**digits - held_out(digits)


@pytest.mark.parametrize(
    ("task", "digits"), [("calculator", 2), ("calculator", 4), ("guess_number", 2), ("guess_number", 4)]
)
def test_the_prompts_of_several_turns_that_the_config_promises_exist(load, task, digits):
    data = load().data.model_copy(update={"num_digits": digits, "dataset_name": task})
    source = DigitTaskSource(task, digits, seed=0)
    few = min(data.train_prompts, 2000)
    assert len(source.validation(data.validation_prompts)) == data.validation_prompts > 0
    assert len(source.train_batch(1, few)) == few
    assert {len(prompt.text) for prompt in source.validation(5)} == {data.prompt_length}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cluster.cpu_workers_per_node=3", "policy.megatron_cfg.tensor_model_parallel_size=2"],
            "cluster.cpu_workers_per_node: num_nodes * cpu_workers_per_node = 3 ranks do not divide into "
            "copies of the model of 2 ranks",
        ),
        (
            ["cluster.gpus_per_node=1", "policy.megatron_cfg.pipeline_model_parallel_size=2"],
            "cluster.gpus_per_node: num_nodes * gpus_per_node = 1 ranks do not divide",
        ),
        (
            ["policy.train_global_batch_size=100"],
            "policy.train_global_batch_size: 100 does not divide the 256 samples of a step",
        ),
        (["policy.train_global_batch_size=100"], "set it to a divisor, such as 64"),
        (
            ["policy.train_global_batch_size=1"],
            "policy.train_global_batch_size: 1 is not divisible by the 2 data-parallel ranks; set it to a multiple "
            "that divides the 256 samples of a step (grpo.num_prompts_per_step * grpo.num_generations_per_prompt), "
            "such as 2",
        ),
        (
            [
                "policy.train_global_batch_size=128",
                "policy.train_micro_batch_size=32",
                "loss_fn.force_on_policy_ratio=true",
            ],
            "loss_fn.force_on_policy_ratio: true needs one optimizer step per rollout",
        ),
        (
            ["policy.max_total_sequence_length=7"],
            "policy.max_total_sequence_length: 7 has no room for the longest prompt (4",
        ),
        (["policy.max_total_sequence_length=7"], "set it to 8"),
        (["data.num_digits=4"], "8 has no room for the longest prompt (5"),
        (
            ["data.max_input_seq_length=3"],
            "data.max_input_seq_length: 3 is shorter than the prompts of copy with num_digits: 3, "
            "which have 4 tokens",
        ),
        (
            [
                "data.num_digits=2",
                "grpo.use_dynamic_sampling=true",
                "grpo.val_period=0",
                "grpo.val_at_end=false",
            ],
            "16 (times batch_multiplier and dynamic_sampling_max_gen_batches) is above the 8",
        ),
        (
            ["data.num_digits=1"],
            "16 (times batch_multiplier) is above the 8 different training prompts",
        ),
        (["grpo.max_val_samples=256"], "grpo.max_val_samples: 256 is above the 90 held-out prompts"),
        (
            ["grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.01"],
            "grpo.batch_multiplier: 1.01 times num_prompts_per_step: 16 is not whole",
        ),
        (
            ["loss_fn.use_kl_in_reward=true"],
            "loss_fn.use_kl_in_reward: true loses the KL penalty with grpo.adv_estimator.name: grpo",
        ),
        (
            ["loss_fn.truncated_importance_sampling_ratio=2"],
            "a bound does nothing with loss_fn.truncated_importance_sampling_type: null",
        ),
        (["grpo.seed=7"], "grpo.seed: 7 contradicts seed: 42"),
        (
            ["policy.megatron_cfg.transformer_impl=transformer_engine"],
            "transformer_impl: transformer_engine needs GPUs, and cluster.gpus_per_node is 0",
        ),
        (
            [
                "checkpointing.enabled=true",
                "checkpointing.metric_name=val:reward",
                "checkpointing.save_period=20",
            ],
            "checkpointing.save_period: 20 is no multiple of grpo.val_period: 50",
        ),
        (
            ["checkpointing.enabled=true", "checkpointing.metric_name=val:reward", "grpo.val_period=0"],
            "checkpointing.metric_name: val:reward needs a validation at each checkpoint",
        ),
        (
            ["checkpointing.metric_name=reward"],
            "'reward' does not say where the metric comes from; write val: or train:",
        ),
        (["checkpointing.metric_name='val:'"], "'val:' does not say where the metric comes from"),
        (["checkpointing.resume=step_3"], "checkpointing.resume: 'step_3' is not read with enabled: false"),
        (
            ["checkpointing.checkpoint_must_save_by=00:03:45:00"],
            "checkpointing.checkpoint_must_save_by: '00:03:45:00' asks for a checkpoint with enabled: false",
        ),
        (
            [
                "checkpointing.enabled=true",
                "policy.megatron_cfg.optimizer.optimizer=sgd",
                "policy.megatron_cfg.optimizer.use_distributed_optimizer=true",
            ],
            "use_distributed_optimizer: true with optimizer: sgd cannot be saved",
        ),
        (
            [
                "cluster.num_nodes=2",
                "policy.generation.colocated.enabled=false",
                "policy.generation.refit_transport=shared_memory",
            ],
            "policy.generation.refit_transport: shared_memory is that of one machine, and cluster.num_nodes is 2; set "
            "it to null",
        ),
        (
            ["cluster.max_trainer_restarts=2"],
            "cluster.max_trainer_restarts: 2 has new ranks begin at the last checkpoint, and checkpointing.enabled is "
            "false; set checkpointing.enabled: true",
        ),
        (
            ["cluster.elastic=shrink", "cluster.max_trainer_restarts=2"],
            "cluster.max_trainer_restarts: 2 has new ranks begin at the last checkpoint",
        ),
        ([*SHRINKING, "cluster.num_nodes=1"], "shrink has no machine to do without: cluster.num_nodes is 1"),
        (
            [*SHRINKING, "cluster.max_trainer_restarts=0"],
            "cluster.elastic: shrink starts ranks anew on the machines that are left, and cluster.max_trainer_restarts "
            "is 0; set cluster.max_trainer_restarts to 1 or more, or cluster.elastic: none",
        ),
        (
            [
                *SHRINKING,
                "cluster.cpu_workers_per_node=1",
                "policy.megatron_cfg.tensor_model_parallel_size=2",
            ],
            "cluster.elastic: shrink finds no number of machines below cluster.num_nodes: 2 whose ranks make whole "
            "copies of the model, among which the batch divides; set cluster.elastic: none",
        ),
        (
            [
                *SHRINKING,
                "cluster.gpus_per_node=2",
                "policy.train_micro_batch_size=64",
                "policy.logprob_batch_size=64",
                "policy.generation.backend=vllm",
            ],
            "cluster.elastic: shrink does not go with engines on the GPUs of the ranks",
        ),
    ],
)
def test_refusals_between_sections(refusals, overrides, message):
    assert any(message in text for text in refusals(*overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        ["policy.megatron_cfg.tensor_model_parallel_size=2"],
        ["policy.megatron_cfg.pipeline_model_parallel_size=2", "policy.model.tie_word_embeddings=true"],
        ["policy.train_global_batch_size=128", "policy.train_micro_batch_size=32"],
        ["grpo.val_period=0", "grpo.val_at_end=false", "grpo.max_val_samples=256"],
        ["grpo.seed=42"],
        ["loss_fn.use_kl_in_reward=true", "grpo.adv_estimator.name=reinforce_plus_plus"],
        ["cluster.gpus_per_node=8", "policy.train_micro_batch_size=32", "policy.logprob_batch_size=32"],
        [
            "policy.model.num_layers=4",
            "policy.megatron_cfg.pipeline_model_parallel_size=2",
            "policy.megatron_cfg.virtual_pipeline_model_parallel_size=2",
            "policy.train_micro_batch_size=256",  # one microbatch: a stage fills up with an empty one
        ],
    ],
)
def test_layouts_and_losses_that_fit(load, overrides):
    load(*overrides)


def test_ranks_are_gpus_where_there_are_any(load):
    config = load(
        "cluster.gpus_per_node=4", "policy.train_micro_batch_size=64", "policy.logprob_batch_size=64"
    )
    assert (config.cluster.world_size, config.data_parallel_size) == (4, 4)
    assert load("policy.megatron_cfg.tensor_model_parallel_size=2").data_parallel_size == 1


def test_the_seed_of_nemo_rl_is_the_seed(tree):
    del tree["seed"]
    tree["grpo"]["seed"] = 7
    assert GRPOMasterConfig.model_validate(tree).seed == 7


@pytest.mark.parametrize("key", ["seed", "+grpo.seed"])
@pytest.mark.parametrize("seed", [-1, 2**31, 10**23])
def test_seeds_that_no_generator_takes_are_refused(refusals, key, seed):
    expected = f"{key.removeprefix('+')}: {seed} is not allowed; allowed: an integer, at least 0 and at most 2147483647"
    assert any(text.startswith(expected) for text in refusals(f"{key}={seed}"))


@pytest.mark.parametrize("seed", [0, 2**31 - 1])
def test_the_ends_of_the_range_of_seeds_are_seeds(load, seed):
    assert load(f"seed={seed}").seed == seed


def test_rules_hold_without_the_loader(tree):
    tree["policy"]["train_global_batch_size"] = 100
    with pytest.raises(ValueError, match="100 does not divide the 256 samples"):
        checked(GRPOMasterConfig, tree)


def test_a_limit_of_time_is_read_as_days_hours_minutes_and_seconds(load):
    config = load("checkpointing.enabled=true", "checkpointing.checkpoint_must_save_by=01:02:03:04")
    assert config.checkpointing.must_save_by_s == 93784
    assert load().checkpointing.must_save_by_s is None


@pytest.mark.parametrize("given", ["'3:45:00'", "'00:00:00:00'", "216000", "soon", "'1:2:3:-4'"])
def test_what_is_no_limit_of_time(refusals, given):
    """YAML 1.1 reads 1:00:00:00 without quotes as 216000."""
    (text,) = refusals("checkpointing.enabled=true", f"checkpointing.checkpoint_must_save_by={given}")
    told = f"checkpointing.checkpoint_must_save_by: {given} is no time: days, hours, minutes and seconds, together"
    assert text.replace("'soon'", "soon").startswith(told)
    assert 'write it as "00:03:45:00", in quotes' in text
