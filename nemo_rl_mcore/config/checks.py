"""Rules between sections of a run: layout, batch arithmetic, lengths, the device, the loss."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl_mcore.config.base import Problem, collect_problems
from nemo_rl_mcore.config.vllm import vllm_problems

if TYPE_CHECKING:
    from nemo_rl_mcore.config.algorithm import AdvantageEstimatorConfig, RolloutConfig
    from nemo_rl_mcore.config.loss import ClippedPGLossConfig
    from nemo_rl_mcore.config.master import (
        DistillationMasterConfig,
        GRPOMasterConfig,
        PPOMasterConfig,
        RunConfig,
    )
    from nemo_rl_mcore.config.policy import PolicyConfig
    from nemo_rl_mcore.config.run_models import ModelPlan

MEGATRON = "policy.megatron_cfg"
LAYOUT = (
    "cluster.num_nodes",
    "cluster.gpus_per_node",
    "cluster.cpu_workers_per_node",
    f"{MEGATRON}.tensor_model_parallel_size",
    f"{MEGATRON}.pipeline_model_parallel_size",
    f"{MEGATRON}.context_parallel_size",
)


def run_problems(config: "RunConfig") -> Iterator[Problem]:
    """Yield what does not go together in a run of any algorithm."""
    yield from _layout_problems(config)
    yield from _batch_problems(config)
    yield from _length_problems(config)
    yield from _validation_problems(config)
    yield from _answer_problems(config)
    yield from _checkpoint_problems(config)
    for plan in config.models.values():
        yield from _second_model_problems(config, plan)
    yield from vllm_problems(config)
    name, loop = config.algorithm, config.loop
    if loop.seed is not None and loop.seed != config.seed:
        yield Problem(
            f"{name}.seed",
            f"{loop.seed} contradicts seed: {config.seed}",
            f"remove {name}.seed; the seed of a run is the top-level seed",
            ("seed",),
        )
    if config.policy.megatron_cfg.overlap_moe_expert_parallel_comm and config.policy.precision == "float32":
        yield Problem(
            f"{MEGATRON}.overlap_moe_expert_parallel_comm",
            "true needs policy.precision: bfloat16, and it is float32",
            "set overlap_moe_expert_parallel_comm: false, or policy.precision: bfloat16",
            ("policy.precision",),
        )
    if config.cluster.on_cpu and config.policy.megatron_cfg.transformer_impl == "transformer_engine":
        yield Problem(
            f"{MEGATRON}.transformer_impl",
            "transformer_engine needs GPUs, and cluster.gpus_per_node is 0",
            "set transformer_impl: auto or local",
            ("cluster.gpus_per_node",),
        )


def _answer_problems(config: "RunConfig") -> Iterator[Problem]:
    if config.data.embedded and config.env.math is not None and config.env.math.gold is not None:
        yield Problem(
            "env.math.gold",
            f"does not go with data.dataset_name: {config.data.dataset_name}, whose answers are digits and no more",
            "set it to null",
            ("data.dataset_name",),
        )


def rollout_problems(config: "RunConfig", loop: "RolloutConfig") -> Iterator[Problem]:
    """Yield what does not go together where the policy answers prompts."""
    yield from _sample_problems(config, loop)
    yield from _prompt_problems(config, loop)


def grpo_problems(config: "GRPOMasterConfig") -> Iterator[Problem]:
    """Yield what does not go together in GRPO."""
    yield from _policy_gradient_problems(config, config.loss_fn)
    yield from _lost_penalty_problems(config, config.loss_fn, config.grpo.adv_estimator)


def ppo_problems(config: "PPOMasterConfig") -> Iterator[Problem]:
    """Yield what does not go together in PPO."""
    yield from _policy_gradient_problems(config, config.loss_fn)
    critic = config.value.train_micro_batch_size
    if critic is not None and config.policy.train_global_batch_size % (config.data_parallel_size * critic):
        yield Problem(
            "value.train_micro_batch_size",
            f"{critic} times {config.data_parallel_size} data-parallel ranks does not divide "
            f"policy.train_global_batch_size: {config.policy.train_global_batch_size}",
            "change it, or leave it out",
            ("policy.train_global_batch_size", *LAYOUT),
        )
    if config.loss_fn.force_on_policy_ratio and config.ppo.ppo_epochs > 1:
        yield Problem(
            "loss_fn.force_on_policy_ratio",
            f"true needs one optimizer step per rollout, and ppo.ppo_epochs: {config.ppo.ppo_epochs} makes more",
            "set ppo.ppo_epochs: 1, or force_on_policy_ratio: false",
            ("ppo.ppo_epochs",),
        )
    if config.ppo.critic_warmup_steps >= config.ppo.max_num_steps:
        yield Problem(
            "ppo.critic_warmup_steps",
            f"{config.ppo.critic_warmup_steps} leaves the policy none of max_num_steps: {config.ppo.max_num_steps}",
            "lower it",
            ("ppo.max_num_steps",),
        )


def distillation_problems(config: "DistillationMasterConfig") -> Iterator[Problem]:
    """Yield what does not go together in distillation."""
    yield from config.teacher.problems_beside(config.policy)
    loop, loss, vocabulary = config.distillation, config.loss_fn, config.policy.model.vocab_size
    if (loop.topk_logits_k or 0) > vocabulary:
        yield Problem(
            "distillation.topk_logits_k",
            f"{loop.topk_logits_k} is above policy.model.vocab_size: {vocabulary}",
            "lower it; null is the whole vocabulary",
            ("policy.model.vocab_size",),
        )
    if not loss.rl_weight:
        return
    yield from _policy_gradient_problems(config, loss.rl, "loss_fn.rl")
    yield from _lost_penalty_problems(config, loss.rl, loop.adv_estimator, "loss_fn.rl")
    if not loop.on_policy:
        yield Problem(
            "loss_fn.rl_weight",
            f"{loss.rl_weight} needs answers of the student, and distillation.on_policy is false",
            "set rl_weight: 0, or distillation.on_policy: true",
            ("distillation.on_policy",),
        )


def given_rows_problems(config: "RunConfig", held_out_batches: int) -> Iterator[Problem]:
    """Yield batches of an embedded task's rows that are larger than the task, where a step takes one such batch."""
    name, loop, data, batch = (
        config.algorithm,
        config.loop,
        config.data,
        config.policy.train_global_batch_size,
    )
    if not data.embedded:
        return
    if batch > data.train_prompts:
        yield Problem(
            "policy.train_global_batch_size",
            f"{batch} is above the {data.train_prompts} different training prompts of data.num_digits: "
            f"{data.num_digits}",
            "lower it, or raise data.num_digits",
            ("data.num_digits",),
        )
    if loop.validates and held_out_batches * batch > data.validation_prompts:
        yield Problem(
            f"{name}.val_batches",
            f"{held_out_batches} times policy.train_global_batch_size: {batch} is above the "
            f"{data.validation_prompts} held-out prompts of data.num_digits: {data.num_digits}",
            "lower one of the two, or raise data.num_digits",
            ("data.num_digits", "policy.train_global_batch_size"),
        )


def sample_budget_problems(config: "RunConfig") -> Iterator[Problem]:
    """Yield a token budget of training with room for the longest row and none for a sample of several."""
    budgets, rows = config.policy.token_budgets, config.rows_per_sample
    longest = config.policy.max_total_sequence_length
    if budgets is not None and longest <= budgets.of_training(rows) < rows * longest:
        yield Problem(
            f"{budgets.section}.train_mb_tokens",
            f"{budgets.train} is below {rows} times policy.max_total_sequence_length: {longest}, which one sample of "
            f"{rows} rows may take",
            f"set it to {rows * longest} or more, or lower max_total_sequence_length",
            ("policy.max_total_sequence_length",),
        )


def _second_model_problems(config: "RunConfig", plan: "ModelPlan") -> Iterator[Problem]:
    """Yield the rules of a policy that a model beside it breaks, unless the recipe's own walk tells of them."""
    if plan.policy is config.policy:
        return
    of_policy = set(collect_problems(config.policy, "policy"))
    of_section = set(collect_problems(getattr(config, plan.name), plan.name))
    if plan.trained:
        problems = collect_problems(plan.policy, "policy")
    else:
        problems = (problem.below("policy") for problem in plan.policy.problems_of_any_model())
    for problem in problems:
        told = plan.in_recipe(problem)
        shared = told.path == problem.path and problem in of_policy
        if not shared and told not in of_section:
            yield told


def _layout_problems(config: "RunConfig") -> Iterator[Problem]:
    world, needed = config.cluster.world_size, config.policy.megatron_cfg.model_parallel_size
    ranks = "cpu_workers_per_node" if config.cluster.on_cpu else "gpus_per_node"
    if world % needed:
        yield Problem(
            f"cluster.{ranks}",
            f"num_nodes * {ranks} = {world} ranks do not divide into copies of the model of {needed} ranks "
            f"({MEGATRON}: tensor * pipeline * context parallel size)",
            f"make the number of ranks a multiple of {needed}, or lower the parallel sizes",
            LAYOUT,
        )
        return
    stages = config.policy.megatron_cfg.pipeline_model_parallel_size
    expert = config.policy.megatron_cfg.expert_model_parallel_size
    expert *= config.policy.megatron_cfg.expert_tensor_parallel_size
    if (world // stages) % expert:
        yield Problem(
            f"{MEGATRON}.expert_model_parallel_size",
            f"expert model * expert tensor parallel size = {expert} does not divide the "
            f"{world // stages} ranks of a pipeline stage",
            "lower it",
            (*LAYOUT, f"{MEGATRON}.expert_tensor_parallel_size"),
        )


def _batch_problems(config: "RunConfig") -> Iterator[Problem]:
    policy = config.policy
    ranks, batch, micro = (
        config.data_parallel_size,
        policy.train_global_batch_size,
        policy.train_micro_batch_size,
    )
    if batch % (ranks * micro):
        yield Problem(
            "policy.train_global_batch_size",
            f"{batch} is not divisible by data-parallel ranks * policy.train_micro_batch_size = "
            f"{ranks} * {micro} = {ranks * micro}",
            "change the micro-batch size, the global batch size or the number of ranks",
            ("policy.train_micro_batch_size", *LAYOUT),
        )


def _sample_problems(config: "RunConfig", loop: "RolloutConfig") -> Iterator[Problem]:
    name, policy, samples = config.algorithm, config.policy, loop.samples_per_step
    factors = (f"{name}.num_prompts_per_step", f"{name}.num_generations_per_prompt")
    ranks, batch = config.data_parallel_size, policy.train_global_batch_size
    if samples % batch:
        yield Problem(
            "policy.train_global_batch_size",
            f"{batch} does not divide the {samples} samples of a step ({' * '.join(factors)})",
            f"set it to a divisor, such as {_divisor_near(batch, samples)}",
            factors,
        )
    share = ranks * policy.logprob_batch_size
    if samples % share:
        yield Problem(
            "policy.logprob_batch_size",
            f"the {samples} samples of a step are not divisible by data-parallel ranks * "
            f"policy.logprob_batch_size = {ranks} * {policy.logprob_batch_size} = {share}",
            "change it, or the number of samples",
            (*factors, "policy.train_micro_batch_size", *LAYOUT),
        )


def _length_problems(config: "RunConfig") -> Iterator[Problem]:
    prompt, response = config.data.max_prompt_length or 1, config.policy.generation.max_new_tokens
    longest = config.policy.max_total_sequence_length
    if prompt + response > longest:
        yield Problem(
            "policy.max_total_sequence_length",
            f"{longest} has no room for the longest prompt ({prompt}: data.max_input_seq_length, or what "
            f"the task needs) and policy.generation.max_new_tokens: {response}",
            f"set it to {prompt + response}, or lower the other two",
            ("data.max_input_seq_length", "data.num_digits", "policy.generation.max_new_tokens"),
        )


def _prompt_problems(config: "RunConfig", loop: "RolloutConfig") -> Iterator[Problem]:
    name, data = config.algorithm, config.data
    drawn = loop.num_prompts_per_step * loop.batch_multiplier
    if drawn != int(drawn):
        yield Problem(
            f"{name}.batch_multiplier",
            f"{loop.batch_multiplier} times num_prompts_per_step: {loop.num_prompts_per_step} is not whole",
            "give a multiple that is",
            (f"{name}.num_prompts_per_step",),
        )
    rounds = loop.dynamic_sampling_max_gen_batches if loop.use_dynamic_sampling else 1
    if data.embedded and drawn * rounds > data.train_prompts:
        factors = (
            "batch_multiplier and dynamic_sampling_max_gen_batches" if rounds > 1 else "batch_multiplier"
        )
        yield Problem(
            f"{name}.num_prompts_per_step",
            f"{loop.num_prompts_per_step} (times {factors}) is above the {data.train_prompts} "
            f"different training prompts of data.num_digits: {data.num_digits}",
            "lower it, or raise data.num_digits",
            ("data.num_digits", f"{name}.batch_multiplier", f"{name}.dynamic_sampling_max_gen_batches"),
        )


def _validation_problems(config: "RunConfig") -> Iterator[Problem]:
    name, loop, data = config.algorithm, config.loop, config.data
    if data.embedded and loop.validates and loop.max_val_samples > data.validation_prompts:
        yield Problem(
            f"{name}.max_val_samples",
            f"{loop.max_val_samples} is above the {data.validation_prompts} held-out prompts of "
            f"data.num_digits: {data.num_digits}",
            "lower it, raise data.num_digits, or turn validation off (val_period: 0, val_at_start and "
            "val_at_end: false)",
            ("data.num_digits", f"{name}.val_period", f"{name}.val_at_start", f"{name}.val_at_end"),
        )


def _policy_gradient_problems(
    config: "RunConfig", loss: "ClippedPGLossConfig", section: str = "loss_fn"
) -> Iterator[Problem]:
    batch, samples = config.policy.train_global_batch_size, config.samples_per_step
    if loss.force_on_policy_ratio and batch != samples:
        yield Problem(
            f"{section}.force_on_policy_ratio",
            f"true needs one optimizer step per rollout, and policy.train_global_batch_size: {batch} "
            f"is not the {samples} samples of a step",
            f"set policy.train_global_batch_size: {samples}, or force_on_policy_ratio: false",
            (
                "policy.train_global_batch_size",
                f"{config.algorithm}.num_prompts_per_step",
                f"{config.algorithm}.num_generations_per_prompt",
            ),
        )
    bounded = (
        loss.truncated_importance_sampling_ratio is not None
        or loss.truncated_importance_sampling_ratio_min is not None
    )
    if bounded and loss.truncated_importance_sampling_type is None:
        yield Problem(
            f"{section}.truncated_importance_sampling_ratio",
            f"a bound does nothing with {section}.truncated_importance_sampling_type: null",
            "set truncated_importance_sampling_type: tis, or the bounds to null",
            (
                f"{section}.truncated_importance_sampling_type",
                f"{section}.truncated_importance_sampling_ratio_min",
            ),
        )


def _lost_penalty_problems(
    config: "RunConfig",
    loss: "ClippedPGLossConfig",
    estimator: "AdvantageEstimatorConfig",
    section: str = "loss_fn",
) -> Iterator[Problem]:
    name = f"{config.algorithm}.adv_estimator.name"
    if loss.use_kl_in_reward and estimator.name == "grpo":
        yield Problem(
            f"{section}.use_kl_in_reward",
            f"true loses the KL penalty with {name}: grpo, which does not subtract it",
            f"set use_kl_in_reward: false, or {name}: reinforce_plus_plus",
            (name,),
        )


def _checkpoint_problems(config: "RunConfig") -> Iterator[Problem]:
    section, period = config.checkpointing, config.loop.val_period
    if not section.enabled:
        return
    if (section.metric_name or "").startswith("val:") and (not period or section.save_period % period):
        yield Problem(
            "checkpointing.metric_name",
            f"{section.metric_name} needs a validation at each checkpoint, and checkpointing.save_period: "
            f"{section.save_period} is no multiple of {config.algorithm}.val_period: {period}",
            "change one of the two, or rank by a train: metric",
            ("checkpointing.save_period", f"{config.algorithm}.val_period"),
        )
    for plan in config.models.values():
        if plan.trained:
            yield from map(plan.in_recipe, _saving_problems(plan.policy))


def _saving_problems(policy: "PolicyConfig") -> Iterator[Problem]:
    optimizer = policy.megatron_cfg.optimizer
    if optimizer.optimizer == "sgd" and optimizer.use_distributed_optimizer:
        yield Problem(
            f"{MEGATRON}.optimizer.use_distributed_optimizer",
            "true with optimizer: sgd cannot be saved, for which checkpointing.enabled: true asks",
            "set use_distributed_optimizer: false",
            ("checkpointing.enabled", f"{MEGATRON}.optimizer.optimizer"),
        )


def _divisor_near(wanted: int, number: int) -> int:
    """The largest divisor of a number that is not above the wanted one."""
    return max(candidate for candidate in range(1, min(wanted, number) + 1) if number % candidate == 0)
