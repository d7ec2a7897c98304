"""Asynchronous rollouts in NeMo RL's recipes: the section async_rl, and those of the algorithms."""

from collections.abc import Callable

import pytest
from refusals import briefs

from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.recipe.of_nemo_rl import is_foreign
from nemo_rl_mcore.recipe.schema import fields
from nemo_rl_mcore.tools.migrate.judgements import RENAMED
from nemo_rl_mcore.tools.migrate.migrate import Migrated, migrate

APART = "policy.generation.colocated.enabled=false"
CHOSEN = "loss_fn.use_importance_sampling_correction=true"
ASYNC = "grpo.async_grpo"


@pytest.fixture
def migrated(exemplar) -> Callable[..., Migrated]:
    """Migrate the exemplar, or another one, with overrides."""
    as_text = ("data.apply_chat_template=false", "data.special_tokens_in_content=text")
    return lambda *overrides, recipe="grpo_copy_cpu.yaml": migrate(
        exemplar.with_name(recipe), (*as_text, *overrides)
    )


@pytest.fixture
def load(migrated):
    return lambda *overrides, **recipe: migrated(*overrides, **recipe).config


@pytest.fixture
def refusals(migrated):
    """The problems of a migrated recipe, without where they stand."""
    return lambda *overrides, **recipe: briefs(migrated(*overrides, **recipe).problems)


def test_every_key_has_one_of_ours():
    assert set(RENAMED.values()) <= {path for kind in RUN_CONFIGS.values() for path in fields(kind)}
    assert all(is_foreign(foreign) for foreign in RENAMED)


def test_it_makes_the_run_asynchronous(load):
    section = load("+async_rl={}", APART, CHOSEN).grpo.async_grpo
    assert section.enabled
    assert section.max_trajectory_age_steps == 1  # as in NeMo RL


def test_its_keys_are_read(load):
    loop = load(
        "+async_rl={sampler: {name: in_order, max_lookahead_versions: 2}, min_groups_for_streaming_train: 4, "
        "max_inflight_prompts: 20, max_buffered_rollouts: 48, recompute_kv_cache_after_weight_updates: true, "
        "in_flight_weight_updates: false, rollout_timeout_s: 60.0, diagnostics: false, "
        "policy_router: {enabled: false}}",
        f"+{ASYNC}=null",
        *(APART, CHOSEN),
    ).grpo
    section = loop.async_grpo
    assert (section.enabled, section.max_trajectory_age_steps, section.rollout_timeout_s) == (True, 2, 60.0)
    assert (section.min_groups_for_streaming_train, section.max_inflight_prompts) == (4, 20)
    assert (section.recompute_kv_cache_after_weight_updates, section.in_flight_weight_updates) == (
        True,
        False,
    )


@pytest.mark.parametrize(
    ("sampler", "bound", "order"),
    [
        ("in_order", "max_lookahead_versions", "in_order"),
        ("weight_fifo", "max_staleness_versions", "in_order"),
        ("ready_first", "max_staleness_versions", "as_completed"),
    ],
)
def test_its_samplers_are_orders(load, sampler, bound, order):
    section = load(f"+async_rl={{sampler: {{name: {sampler}, {bound}: 3}}}}", APART, CHOSEN).grpo.async_grpo
    assert (section.order, section.max_trajectory_age_steps) == (order, 3)


def test_a_section_that_is_null_asks_for_nothing(load):
    assert not load("+async_rl=null", f"+{ASYNC}=null").asynchronous


@pytest.mark.parametrize(
    ("override", "told"),
    [
        *(
            (
                f"+async_rl.sampler.name={name}",
                "async_rl.sampler.name: not-supported",
            )
            for name in ("custom", "another")
        ),
        (
            "+async_rl.max_weight_staleness_versions=1",
            "async_rl.max_weight_staleness_versions: not-supported",
        ),
        (
            "+async_rl.max_buffered_rollouts=31",
            "async_rl.max_buffered_rollouts: not-supported",
        ),
        (
            "+async_rl.max_buffered_rollouts=many",
            "async_rl.max_buffered_rollouts: not-supported",
        ),
        (
            "+async_rl.watchdog.stall_timeout_s=600",
            "async_rl.watchdog: not-supported",
        ),
        (
            "+async_rl.generation_timeout_s=60",
            "async_rl.generation_timeout_s: not-supported",
        ),
        (
            "+async_rl.fleet_health.enabled=true",
            "async_rl.fleet_health: not-supported",
        ),
        (
            "+async_rl.min_groups_for_streaming_train=17",
            "async_rl.min_groups_for_streaming_train: too-large (num_prompts_per_step)",
        ),
        (
            "+async_rl.sampler.max_lookahead_versions=-1",
            "async_rl.sampler.max_lookahead_versions: not-allowed",
        ),
        ("+async_rl=true", "async_rl: not-supported"),
    ],
)
def test_refusals_name_the_key_that_was_written(refusals, override, told):
    (text,) = refusals(override, APART, CHOSEN)
    assert text.startswith(told)


def test_the_line_of_a_foreign_key_is_found(exemplar, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"defaults: {exemplar}\nloss_fn:\n  use_importance_sampling_correction: true\n"
        "data: {apply_chat_template: false, special_tokens_in_content: text}\n"
        "async_rl:\n  max_inflight_prompts: 3\npolicy:\n  generation:\n    colocated:\n      enabled: false\n"
    )
    (problem,) = migrate(recipe).problems
    assert problem.path == "async_rl.max_inflight_prompts"
    assert problem.where.endswith("recipe.yaml:6")


def test_the_age_of_either_section_says_how_large_a_buffer_is(load, refusals):
    given = ("+async_rl.max_buffered_rollouts=47", APART, CHOSEN)
    load(*given)
    (text,) = refusals(*given, f"{ASYNC}.max_trajectory_age_steps=2")
    assert text.startswith("async_rl.max_buffered_rollouts: not-supported")


def test_two_sections_may_agree_and_not_contradict(load, refusals):
    given = ("+async_rl.sampler.max_lookahead_versions=2", APART, CHOSEN)
    load(*given, f"{ASYNC}.max_trajectory_age_steps=2")
    (text,) = refusals(*given, f"{ASYNC}.max_trajectory_age_steps=3")
    assert text == ("async_rl.sampler.max_lookahead_versions: not-supported")
    (text,) = refusals(*given, f"{ASYNC}.enabled=false")
    assert text == ("async_rl: not-supported")


@pytest.mark.parametrize("algorithm", ["ppo", "dpo", "sft", "distillation"])
def test_it_is_of_grpo_alone(refusals, algorithm):
    (text,) = refusals("+async_rl.sampler.name=in_order", recipe=f"{algorithm}_cpu.yaml")
    assert text == ("async_rl: not-supported")


def test_several_optimizer_steps_and_dynamic_sampling_go_with_it(load):
    config = load("+async_rl={}", APART, CHOSEN, "policy.train_global_batch_size=64")
    assert (config.asynchronous, config.samples_per_step) == (True, 4 * 64)
    config = load("+async_rl={}", APART, CHOSEN, "grpo.use_dynamic_sampling=true")
    assert config.asynchronous
    assert config.grpo.use_dynamic_sampling


PPO = {"recipe": "ppo_cpu.yaml"}


def test_the_section_of_ppo_is_read(load):
    config = load(
        "+ppo.async_ppo={enabled: true, max_trajectory_age_steps: 2, in_flight_weight_updates: true, "
        "recompute_kv_cache_after_weight_updates: true, drop_incomplete_targets_on_restore: false, "
        "warmup_generation_lead_steps: null}",
        *(APART, CHOSEN),
        **PPO,
    )
    assert (config.asynchronous, config.max_age, config.max_live_groups) == (True, 2, 3 * 64)
    assert config.asynchrony.in_flight_weight_updates
    assert config.asynchrony.recompute_kv_cache_after_weight_updates
    assert config.ppo.ppo_epochs == 2


@pytest.mark.parametrize(
    ("algorithm", "given", "in_flight"),
    [
        ("ppo", "{enabled: true}", False),
        ("ppo", "{enabled: true, in_flight_weight_updates: true}", True),
        ("grpo", "{enabled: true}", False),
    ],
)
def test_updates_wait_for_answers_where_a_recipe_does_not_say_otherwise(load, algorithm, given, in_flight):
    """As NeMo RL has it."""
    recipe = {"recipe": "ppo_cpu.yaml"} if algorithm == "ppo" else {}
    config = load(f"++{algorithm}.async_{algorithm}={given}", APART, CHOSEN, **recipe)
    assert config.asynchrony.in_flight_weight_updates is in_flight


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("warmup_generation_lead_steps", "4", True),
        ("warmup_generation_lead_steps", "2", False),  # as many as max_trajectory_age_steps
        ("drop_incomplete_targets_on_restore", "true", True),
        ("drop_incomplete_targets_on_restore", "false", False),
    ],
)
def test_keys_of_ppo_that_nothing_reads_here(migrated, key, value, told):
    section = "+ppo.async_ppo={enabled: true, max_trajectory_age_steps: 2}"
    made = migrated(section, f"+ppo.async_ppo.{key}={value}", APART, CHOSEN, **PPO)
    assert briefs(made.problems) == ([f"ppo.async_ppo.{key}: not-supported"] if told else [])


def test_a_broken_section_is_told_as_such(refusals):
    texts = refusals("+async_rl.max_inflight_prompts=20", f"{ASYNC}=3")
    assert any("grpo.async_grpo: not-allowed" in text for text in texts)
