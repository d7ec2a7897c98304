"""What does not go with asynchronous rollouts: all of it stands here, with what goes and is worth a word."""

from collections.abc import Iterator

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import Problem, has_no_effect
from nemo_rl_mcore.config.master import GRPOMasterConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.recipe.rules.feature import Rules
from nemo_rl_mcore.recipe.rules.losses import policy_gradient

_COLOCATED = "policy.generation.colocated"


def _run(config: RunConfig) -> Iterator[Problem]:
    if config.asynchronous:
        for rule in (_sampled, _whole_steps, _groups, _engines, _estimator, _mismatch, _correction):
            yield from rule(config)


def _enabled(config: RunConfig) -> str:
    return f"{config.asynchrony_key}.enabled"


def _synchronous(config: RunConfig) -> str:
    return f"or {_enabled(config)}: false"


def _streaming(config: RunConfig) -> str:
    return f"{config.asynchrony_key}.min_groups_for_streaming_train"


def _sampled(config: RunConfig) -> Iterator[Problem]:
    """Yield a run whose answers the data set gives."""
    if not config.generations_per_prompt:
        key = {"dpo": "dpo.online", "distillation": "distillation.on_policy"}[config.algorithm]
        yield Problem(
            "requires",
            _enabled(config),
            f"true samples ahead of training, and with {key}: false the data set gives the answers",
            f"set it to false, or {key}: true",
            (key,),
        )


def _whole_steps(config: RunConfig) -> Iterator[Problem]:
    """Yield chunks of a step that is more than one optimizer step, or that its algorithm takes whole."""
    batch, samples = config.policy.train_global_batch_size, config.samples_per_step
    if not config.streams:
        return
    if not isinstance(config, GRPOMasterConfig):
        yield Problem(
            "incompatible",
            _streaming(config),
            f"{config.min_groups_per_chunk} trains on groups before the step is whole, and {config.algorithm} takes "
            "whole steps",
            "set it to null",
            (_enabled(config),),
        )
    # A batch that does not divide the samples is told in batch_sizes.
    elif batch != samples and samples % batch == 0:
        yield Problem(
            "incompatible",
            _streaming(config),
            f"{config.min_groups_per_chunk} trains on groups before the step is whole, and "
            f"policy.train_global_batch_size: {batch} makes {samples // batch} optimizer steps "
            f"of its {samples} samples",
            f"set it to null, or policy.train_global_batch_size: {samples}",
            (_enabled(config), "policy.train_global_batch_size", "grpo.num_prompts_per_step"),
        )


def _groups(config: RunConfig) -> Iterator[Problem]:
    section, loop, groups = config.asynchrony, config.loop, config.prompts_per_step
    if isinstance(loop, RolloutConfig) and loop.use_dynamic_sampling and loop.batch_multiplier != 1:
        key = f"{config.algorithm}.batch_multiplier"
        where = f"with {_enabled(config)}: true, where the next prompt takes the place of one without signal at once"
        yield has_no_effect(key, loop.batch_multiplier, where, _enabled(config))
    least, most = section.min_groups_for_streaming_train, section.max_inflight_prompts
    of_groups = config.prompts_key
    if least is not None and least > groups:
        yield Problem(
            "too-large",
            _streaming(config),
            f"{least} is above the {groups} groups of a step ({of_groups})",
            "lower it; null waits for the whole step",
            (of_groups,),
        )
    if most is not None and most < groups:
        yield Problem(
            "too-small",
            f"{config.asynchrony_key}.max_inflight_prompts",
            f"{most} is below the {groups} groups of a step ({of_groups})",
            f"set it to {groups} or more, or to null",
            (of_groups,),
        )


def _engines(config: RunConfig) -> Iterator[Problem]:
    """Yield engines that take turns with the ranks, or that weights cannot reach while they answer."""
    generation, on_cpu = config.policy.generation, config.cluster.on_cpu
    related = (
        _enabled(config),
        "policy.generation.backend",
        f"{_COLOCATED}.enabled",
        "cluster.gpus_per_node",
    )
    if generation.decodes_on_ranks:
        yield Problem(
            "incompatible",
            f"{_COLOCATED}.enabled",
            "true has the training ranks answer (policy.generation.backend: embedded), and "
            f"{_enabled(config)}: true needs engines that answer meanwhile",
            f"set it to false, {_synchronous(config)}",
            related,
        )
    elif generation.engine.sleeps and generation.colocated.enabled and not on_cpu:
        yield Problem(
            "incompatible",
            f"{_COLOCATED}.enabled",
            f"true puts the {generation.engine.noun}s to sleep while the ranks train, and {_enabled(config)}: true "
            "needs engines that answer meanwhile",
            f"set it to false with {_COLOCATED}.resources.gpus_per_node, {_synchronous(config)}",
            related,
        )
    if (key := generation.engine.required_for_groups) is not None:
        yield Problem(
            "requires",
            f"policy.generation.{key}",
            f"false answers whole batches, and {_enabled(config)}: true asks group by group",
            f"set it to true, {_synchronous(config)}",
            (_enabled(config), "policy.generation.backend"),
        )


def _estimator(config: RunConfig) -> Iterator[Problem]:
    if not (isinstance(config, GRPOMasterConfig) and config.streams):
        return
    estimator = config.grpo.adv_estimator
    if (name := estimator.type or estimator.name) != "grpo":
        yield Problem(
            "incompatible",
            _streaming(config),
            f"{config.min_groups_per_chunk} trains on groups before the step is whole, and "
            f"grpo.adv_estimator: {name} may read the whole step, as one does that whitens advantages",
            "set it to null, or grpo.adv_estimator.name: grpo",
            (_enabled(config), "grpo.adv_estimator.name", "grpo.num_prompts_per_step"),
        )


def _mismatch(config: RunConfig) -> Iterator[Problem]:
    mismatch = config.policy.generation.mismatch
    if config.max_age and mismatch.threshold is not None and mismatch.action != "warn":
        yield Problem(
            "incompatible",
            "policy.generation.mismatch.action",
            f"{mismatch.action} would act on age: with {config.age_key}: {config.max_age} the "
            "weights that answered are older than those that training compares with",
            f"set it to warn, threshold to null, or {config.age_key}: 0",
            ("policy.generation.mismatch.threshold", _enabled(config), config.age_key),
        )


def _correction(config: RunConfig) -> Iterator[Problem]:
    """Off-policy training without correction is a choice that a recipe must make itself."""
    of_loss = policy_gradient(config)
    if of_loss is None or not config.max_age:
        return
    section, loss, _ = of_loss
    if "use_importance_sampling_correction" not in loss.model_fields_set:
        key = f"{section}.use_importance_sampling_correction"
        yield Problem(
            "missing",
            key,
            f"is left out with {config.age_key}: {config.max_age}, where older weights have "
            "answered than those that train",
            f"set {key}: true, {section}.truncated_importance_sampling_type: tis and "
            f"{section}.truncated_importance_sampling_ratio: 2.0; or to false, which trains as if the answers were new",
            (_enabled(config), config.age_key),
        )


def remarks(config: RunConfig) -> Iterator[str]:
    """Yield what a recipe may ask for, and whoever asks should know."""
    if not config.asynchronous:
        return
    section, generation, of_loss = config.asynchrony, config.policy.generation, policy_gradient(config)
    if config.max_age and of_loss is not None and not of_loss[1].use_importance_sampling_correction:
        key = f"{of_loss[0]}.use_importance_sampling_correction"
        yield f"{key}: false: older answers train as if the present weights had given them"
    if not section.in_flight_weight_updates:
        key = f"{config.asynchrony_key}.in_flight_weight_updates"
        yield f"{key}: false: each update waits until no group is being answered"
    if generation.engine.always_rereads and not section.recompute_kv_cache_after_weight_updates:
        key = f"{config.asynchrony_key}.recompute_kv_cache_after_weight_updates"
        yield f"{key}: false: {generation.engine.noun}s recompute it all the same"
    if config.streams and config.policy.model.load_balancing_loss:
        yield f"policy.model.moe_aux_loss_coeff: the loss depends on how {_streaming(config)} cuts a step"


RULES = Rules(of_runs=(_run,))
