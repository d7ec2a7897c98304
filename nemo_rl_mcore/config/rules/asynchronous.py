"""What does not go with sampling beside training: all of it stands here, with what goes and is worth a word."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.master import GRPOMasterConfig, RunConfig
from nemo_rl_mcore.config.rules.feature import Rules

_SECTION = "grpo.async_grpo"
_ENABLED = f"{_SECTION}.enabled"
_AGE = f"{_SECTION}.max_trajectory_age_steps"
_STREAMING = f"{_SECTION}.min_groups_for_streaming_train"
_CORRECTION = "loss_fn.use_importance_sampling_correction"
_COLOCATED = "policy.generation.colocated"
_SYNCHRONOUS = f"or {_ENABLED}: false"


def _run(config: RunConfig) -> Iterator[Problem]:
    if isinstance(config, GRPOMasterConfig) and config.asynchronous:
        for rule in (_whole_steps, _groups, _engines, _estimator, _mismatch, _correction):
            yield from rule(config)


def _whole_steps(config: GRPOMasterConfig) -> Iterator[Problem]:
    batch, samples = config.policy.train_global_batch_size, config.samples_per_step
    # A batch that does not divide the samples is told in batch_sizes.
    if config.grpo.streams and batch != samples and samples % batch == 0:
        yield Problem(
            "incompatible",
            _STREAMING,
            f"{config.grpo.min_groups_per_chunk} trains on groups before the step is whole, and "
            f"policy.train_global_batch_size: {batch} makes {samples // batch} optimizer steps "
            f"of its {samples} samples",
            f"set it to null, or policy.train_global_batch_size: {samples}",
            (_ENABLED, "policy.train_global_batch_size", "grpo.num_prompts_per_step"),
        )


def _groups(config: GRPOMasterConfig) -> Iterator[Problem]:
    section, groups = config.grpo.async_grpo, config.grpo.num_prompts_per_step
    if config.grpo.use_dynamic_sampling:
        yield Problem(
            "incompatible",
            "grpo.use_dynamic_sampling",
            f"true does not go with {_ENABLED}: true, where each prompt has its step before it is answered",
            f"set it to false, {_SYNCHRONOUS}",
            (_ENABLED,),
        )
    least, most = section.min_groups_for_streaming_train, section.max_inflight_prompts
    if least is not None and least > groups:
        yield Problem(
            "too-large",
            _STREAMING,
            f"{least} is above the {groups} groups of a step (grpo.num_prompts_per_step)",
            "lower it; null waits for the whole step",
            ("grpo.num_prompts_per_step",),
        )
    if most is not None and most < groups:
        yield Problem(
            "too-small",
            f"{_SECTION}.max_inflight_prompts",
            f"{most} is below the {groups} groups of a step (grpo.num_prompts_per_step)",
            f"set it to {groups} or more, or to null",
            ("grpo.num_prompts_per_step",),
        )


def _engines(config: GRPOMasterConfig) -> Iterator[Problem]:
    """Yield engines that take turns with the ranks, or that weights cannot reach while they answer."""
    generation, on_cpu = config.policy.generation, config.cluster.on_cpu
    related = (_ENABLED, "policy.generation.backend", f"{_COLOCATED}.enabled", "cluster.gpus_per_node")
    if generation.decodes_on_ranks:
        yield Problem(
            "incompatible",
            f"{_COLOCATED}.enabled",
            f"true has the training ranks answer (policy.generation.backend: embedded), and {_ENABLED}: true needs "
            "engines that answer meanwhile",
            f"set it to false, {_SYNCHRONOUS}",
            related,
        )
    elif generation.backend == "vllm" and generation.colocated.enabled and not on_cpu:
        yield Problem(
            "incompatible",
            f"{_COLOCATED}.enabled",
            f"true puts the vLLM engines to sleep while the ranks train, and {_ENABLED}: true needs engines that "
            "answer meanwhile",
            f"set it to false with {_COLOCATED}.resources.gpus_per_node, {_SYNCHRONOUS}",
            related,
        )
    if generation.backend == "vllm" and not generation.vllm_cfg.async_engine:
        yield Problem(
            "requires",
            "policy.generation.vllm_cfg.async_engine",
            f"false answers whole batches, and {_ENABLED}: true asks group by group",
            f"set it to true, {_SYNCHRONOUS}",
            (_ENABLED, "policy.generation.backend"),
        )


def _estimator(config: GRPOMasterConfig) -> Iterator[Problem]:
    name = config.grpo.adv_estimator.name
    if config.grpo.streams and name != "grpo":
        yield Problem(
            "incompatible",
            _STREAMING,
            f"{config.grpo.min_groups_per_chunk} trains on groups before the step is whole, and "
            f"grpo.adv_estimator.name: {name} whitens advantages over the whole step",
            "set it to null, or grpo.adv_estimator.name: grpo",
            (_ENABLED, "grpo.adv_estimator.name", "grpo.num_prompts_per_step"),
        )


def _mismatch(config: GRPOMasterConfig) -> Iterator[Problem]:
    mismatch = config.policy.generation.mismatch
    if config.grpo.async_grpo.off_policy and mismatch.threshold is not None and mismatch.action != "warn":
        yield Problem(
            "incompatible",
            "policy.generation.mismatch.action",
            f"{mismatch.action} would act on age: with {_AGE}: {config.grpo.async_grpo.max_trajectory_age_steps} the "
            "weights that answered are older than those that training compares with",
            f"set it to warn, threshold to null, or {_AGE}: 0",
            ("policy.generation.mismatch.threshold", _ENABLED, _AGE),
        )


def _correction(config: GRPOMasterConfig) -> Iterator[Problem]:
    """Off-policy training without correction is a choice that a recipe must make itself."""
    chosen = "use_importance_sampling_correction" in config.loss_fn.model_fields_set
    if config.grpo.async_grpo.off_policy and not chosen:
        yield Problem(
            "missing",
            _CORRECTION,
            f"is left out with {_AGE}: {config.grpo.async_grpo.max_trajectory_age_steps}, where older weights have "
            "answered than those that train",
            f"set {_CORRECTION}: true, loss_fn.truncated_importance_sampling_type: tis and "
            "loss_fn.truncated_importance_sampling_ratio: 2.0; or to false, which trains as if the answers were new",
            (_ENABLED, _AGE),
        )


def remarks(config: RunConfig) -> Iterator[str]:
    """Yield what a recipe may ask for, and whoever asks should know."""
    if not isinstance(config, GRPOMasterConfig) or not config.asynchronous:
        return
    section, generation = config.grpo.async_grpo, config.policy.generation
    if section.off_policy and not config.loss_fn.use_importance_sampling_correction:
        yield f"{_CORRECTION}: false: older answers train as if the present weights had given them"
    if not section.in_flight_weight_updates:
        yield f"{_SECTION}.in_flight_weight_updates: false: each update waits until no group is being answered"
    if generation.backend == "vllm" and not section.recompute_kv_cache_after_weight_updates:
        yield f"{_SECTION}.recompute_kv_cache_after_weight_updates: false: vLLM recomputes it all the same"
    if config.grpo.streams and config.policy.model.load_balancing_loss:
        yield f"policy.model.moe_aux_loss_coeff: the loss depends on how {_STREAMING} cuts a step"


RULES = Rules(of_runs=(_run,))
