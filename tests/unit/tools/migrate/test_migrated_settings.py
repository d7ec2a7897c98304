"""Settings that NeMo RL's recipes have by their names: what they do there, and the migrated recipe here."""

import pytest
from migrations import told

from nemo_rl_mcore.config.base import value_at
from nemo_rl_mcore.tools.migrate.draft import Kind


@pytest.mark.parametrize(
    ("repeat", "asked", "taken"),
    [(16, 512, None), (16, 480, 448), (32, 512, 512), (1, 64, None)],
)
def test_a_validation_takes_no_more_rows_than_a_known_set_has(migrated, repeat, asked, taken):
    """max_val_samples there is a bound: dataset.repeat, and max_val_samples // val_batch_size batches of at most it."""
    validation = f"validation: {{dataset_name: AIME2024, repeat: {repeat}}}"
    loop = f"grpo: {{max_val_samples: {asked}, val_batch_size: 64}}"
    result = migrated(f"data: {{{validation}}}\n{loop}")
    assert value_at(result.draft.tree, "grpo.max_val_samples") == taken
    assert value_at(result.draft.tree, "data.validation.repeat") == repeat
    assert not result.draft.refused


def test_a_distillation_rounds_its_batches_up(migrated):
    """algorithms/distillation.py adds val_batch_size - 1 before it divides; the others do not."""
    changes = "distillation: {max_val_samples: 100, val_batch_size: 64}"
    tree = migrated(changes, "distillation_math_megatron").draft.tree
    assert value_at(tree, "distillation.max_val_samples") == 128
    assert (
        value_at(migrated(changes.replace("distillation", "grpo")).draft.tree, "grpo.max_val_samples") == 64
    )


def test_rows_of_several_sources_to_validate_with_are_told_to_be_shared_out(migrated):
    """`merge_datasets` joins them, and the first max_val_samples are those of the first source."""
    two = "data: {validation: [{dataset_name: AIME2024, repeat: 16}, {dataset_name: DAPOMathAIME2024}]}"
    assert Kind.CHANGED in told(migrated(two), "grpo.max_val_samples")
    assert told(migrated("data: {validation: [{dataset_name: AIME2024}]}"), "grpo.max_val_samples") == []


def test_keys_of_a_source_that_its_data_set_does_not_read_there_are_dropped(migrated):
    result = migrated("data: {train: {dataset_name: DeepScaler, repeat: 4, max_samples: 9}}")
    assert {"data.train.repeat", "data.train.max_samples"} <= {*result.draft.dropped}
    assert not {"repeat", "max_samples"} & value_at(result.draft.tree, "data.train").keys()


@pytest.mark.parametrize("transport", ["nixl", "nccl_reshard", "vllm_s3_sparse", "vllm_zmq_sparse"])
def test_weights_travel_as_the_layout_says(migrated, transport):
    result = migrated(f"policy: {{generation: {{refit_transport: {transport}}}}}")
    assert value_at(result.draft.tree, "policy.generation.refit_transport") is None
    assert told(result, "policy.generation.refit_transport") == [Kind.WARNED]


def test_a_way_of_ones_own_to_send_weights_is_left_to_settle(migrated):
    result = migrated("policy: {generation: {refit_transport: 'mine:Engine'}}")
    assert told(result, "policy.generation.refit_transport") == [Kind.OPEN]


@pytest.mark.parametrize(("enabled", "epochs"), [(True, None), (False, 15)])
def test_an_asynchronous_ppo_counts_no_passes(migrated, enabled, epochs):
    """algorithms/ppo.py: CyclingDataLoader, and max_training_steps = max_num_steps."""
    changes = f"ppo: {{max_num_epochs: 15, async_ppo: {{enabled: {str(enabled).lower()}}}}}"
    result = migrated(changes, "ppo_math_1B_megatron")
    assert value_at(result.draft.tree, "ppo.max_num_epochs") == epochs


def test_sequences_beyond_the_positions_of_the_weights_are_told(migrated):
    """NeMo RL asks no model how long its sequences may be: rotations go on."""
    name = "policy: {model_name: Qwen/Qwen2.5-Math-7B, max_total_sequence_length: 16384}"
    result = migrated(name)
    path = "policy.hf_config_overrides.max_position_embeddings"
    assert (value_at(result.draft.tree, path), told(result, path)) == (16384, [Kind.CHANGED])
    assert result.config.policy.model.longest_sequence == 16384
    assert not migrated(name.replace("16384", "4096")).draft.section("policy.hf_config_overrides")


def test_overrides_of_config_json_are_kept_and_empty_ones_dropped(migrated):
    scaling = "{rope_type: yarn, rope_theta: 1.0e6, factor: 2.0, original_max_position_embeddings: 131072}"
    long = f"policy: {{max_total_sequence_length: 200000, hf_config_overrides: {{rope_scaling: {scaling}}}}}"
    result = migrated(f"{long.replace('policy: {', 'policy: {model_name: Qwen/Qwen2.5-1.5B, ')}")
    assert not told(result, "policy.hf_config_overrides.max_position_embeddings")
    assert result.config.policy.model.rope_scaling.factor == 2.0
    assert "policy.hf_config_overrides" in migrated("policy: {hf_config_overrides: {}}").draft.dropped


def test_a_critic_with_overrides_of_its_own_is_refused(migrated):
    own = "value: {hf_config_overrides: {max_position_embeddings: 9}}"
    assert "value.hf_config_overrides" in migrated(own, "ppo_math_1B_megatron").draft.refused


@pytest.mark.parametrize(
    ("norm", "clip", "effective"), [(1.0, 0.0, 0.0), ("null", 0.5, 0.5), (2.0, 2.0, 2.0)]
)
def test_gradients_are_clipped_to_the_norm_that_megatron_reads(migrated, norm, clip, effective):
    """The comment in models/policy/__init__.py: max_grad_norm is DTensor's, and Megatron's is called clip_grad."""
    result = migrated(
        f"policy: {{max_grad_norm: {norm}, megatron_cfg: {{optimizer: {{clip_grad: {clip}}}}}}}"
    )
    assert result.config.policy.max_grad_norm == effective


def test_dtensor_clips_to_its_own_norm_and_null_is_none(migrated):
    for norm, effective in (("null", 0.0), (3.0, 3.0)):
        result = migrated(f"policy: {{max_grad_norm: {norm}}}", "grpo_math_1B")
        assert result.config.policy.max_grad_norm == effective


WINDOWED = """async_rl:
  sampler: {{name: windowed, max_staleness_versions: 2{}}}
  max_buffered_rollouts: 64
"""


def test_the_window_of_ages_is_kept_and_what_is_discarded_there_is_told(migrated):
    """async_utils/staleness_sampler.py: any ready group within the window; those below it are evicted."""
    base = "grpo_math_1B_megatron_single_controller"
    result = migrated(WINDOWED.format(""), base)
    own = result.config.grpo.async_grpo
    assert (own.enabled, own.order, own.max_trajectory_age_steps) == (True, "as_completed", 2)
    assert told(result, "grpo.async_grpo.order") == [Kind.CHANGED]
    assert not result.draft.refused
    freshest = migrated(WINDOWED.format(", sample_freshest_first: true"), base)
    assert "async_rl.sampler.name" in freshest.draft.refused


@pytest.mark.parametrize(
    ("changes", "path", "kind"),
    [
        ("grpo: {val_start_at: 5}", "grpo.val_start_at", Kind.REFUSED),
        ("grpo: {stop_at_validation_metric: accuracy}", "grpo.stop_at_validation_metric", Kind.REFUSED),
        ("grpo: {stop_at_validation_threshold: 0.9}", "grpo.stop_at_validation_threshold", Kind.REFUSED),
        ("policy: {generation: {bad_words: [no]}}", "policy.generation.bad_words", Kind.REFUSED),
        ("grpo: {invalid_tool_call_advantage: -5.0}", "grpo.invalid_tool_call_advantage", Kind.REFUSED),
        ("grpo: {malformed_thinking_advantage: -5.0}", "grpo.malformed_thinking_advantage", Kind.REFUSED),
        ("reward_penalties: {penalize_unwanted_tokens: true}", "reward_penalties", Kind.REFUSED),
        (
            "grpo: {skip_reference_policy_logprobs_calculation: true}",
            "grpo.skip_reference_policy_logprobs_calculation",
            Kind.REFUSED,
        ),
        ("grpo: {adv_estimator: {name: gdpo}}", "grpo.adv_estimator.name", Kind.OPEN),
        ("data: {train: {dataset_name: squad}}", "data.train.dataset_name", Kind.OPEN),
        ("data: {validation: {dataset_name: AIME2025}}", "data.validation.dataset_name", Kind.OPEN),
        ("data: {add_generation_prompt: maybe}", "data.add_generation_prompt", None),
        (
            "loss_fn: {reference_policy_kl_penalty: 0}\ngrpo: {skip_reference_policy_logprobs_calculation: true}",
            "grpo.skip_reference_policy_logprobs_calculation",
            None,
        ),
        ("reward_penalties: {penalize_unwanted_tokens: false}", "reward_penalties", None),
        ("policy: {generation: {bad_words: []}}", "policy.generation.bad_words", None),
    ],
)
def test_what_is_not_here_is_refused_by_name_and_what_changes_nothing_is_not(migrated, changes, path, kind):
    result = migrated(changes)
    assert told(result, path) == ([] if kind is None else [kind])
    if kind is None:
        assert path in result.draft.dropped
