"""What a key of NeMo RL does there, and what the migrated recipe does here: effective values side by side."""

import time

import pytest
from migrations import told

from nemo_rl_mcore.config.base import value_at
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.data.row_readers import RowReader
from nemo_rl_mcore.data.rows import Row
from nemo_rl_mcore.engine.engine import Sampling
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.recipe.rules.batching import divisor_near
from nemo_rl_mcore.recipe.schema import field_at
from nemo_rl_mcore.tools.migrate.draft import Draft, Kind
from nemo_rl_mcore.tools.migrate.meaning import _OF_LOOPS, write_defaults

OWN_ENGINES = "policy: {{generation: {{colocated: {{enabled: false, resources: {{{}}}}}}}}}\ncluster: {{{}}}"


@pytest.mark.parametrize(
    ("resources", "cluster", "training"),
    [
        ("num_nodes: 1, gpus_per_node: 8", "num_nodes: 3, gpus_per_node: 8", (2, 8)),
        ("num_nodes: 16, gpus_per_node: 8", "num_nodes: 24, gpus_per_node: 8", (8, 8)),
        ("num_nodes: null, gpus_per_node: 4", "num_nodes: 1, gpus_per_node: 8", (1, 4)),
        ("num_nodes: 1, gpus_per_node: 2", "num_nodes: 1, gpus_per_node: 4", (1, 2)),
    ],
)
def test_gpus_of_engines_are_taken_out_of_the_cluster(migrated, resources, cluster, training):
    """As algorithms/grpo.py does: whole machines, or GPUs of the only one."""
    result = migrated(OWN_ENGINES.format(resources, cluster))
    tree = result.draft.tree
    assert (value_at(tree, "cluster.num_nodes"), value_at(tree, "cluster.gpus_per_node")) == training
    engines = value_at(tree, "policy.generation.colocated.resources")
    assert engines["gpus_per_node"] == int(resources[-1])
    changed = "cluster.num_nodes" if training[0] > 1 or "num_nodes: 3" in cluster else "cluster.gpus_per_node"
    assert told(result, changed) == [Kind.CHANGED]


def test_engines_that_leave_nothing_to_train_on_are_refused(migrated):
    result = migrated(OWN_ENGINES.format("num_nodes: 1, gpus_per_node: 8", "num_nodes: 1, gpus_per_node: 8"))
    assert told(result, "policy.generation.colocated.resources.gpus_per_node") == [Kind.REFUSED]
    assert value_at(result.draft.tree, "cluster.gpus_per_node") == 8


def test_resources_of_engines_that_share_gpus_are_read_by_neither(migrated):
    changes = (
        "policy: {generation: {colocated: {enabled: true, resources: {num_nodes: 1, gpus_per_node: 8}}}}"
    )
    result = migrated(changes)
    assert value_at(result.draft.tree, "policy.generation.colocated.resources") is None
    assert {
        "policy.generation.colocated.resources.num_nodes",
        "policy.generation.colocated.resources.gpus_per_node",
    } <= {*result.draft.dropped}
    assert result.config is not None
    assert result.config.cluster.world_size == migrated().config.cluster.world_size


def rate(schedule, peak, ticks):
    """Of a linear warm-up to a constant rate, after so many ticks: the formula of both schedulers."""
    done = min(1.0, ticks / schedule["lr_warmup_iters"])
    return schedule["lr_warmup_init"] + done * (peak - schedule["lr_warmup_init"])


@pytest.mark.parametrize(("batch", "steps"), [(512, 1), (256, 2), (32, 16)])
def test_the_learning_rate_of_each_rollout_is_theirs(migrated, batch, steps):
    """There a rollout is one tick; here each of its optimizer steps is."""
    changes = f"""
grpo: {{num_prompts_per_step: 32, num_generations_per_prompt: 16}}
policy:
  train_global_batch_size: {batch}
  megatron_cfg: {{scheduler: {{lr_warmup_iters: 13, lr_warmup_init: 5.0e-7, lr_decay_iters: 1000}}}}"""
    result = migrated(changes)
    theirs = value_at(result.read.tree, "policy.megatron_cfg.scheduler")
    ours = value_at(result.draft.tree, "policy.megatron_cfg.scheduler")
    for rollout in (0, 1, 7, 13, 20):
        assert rate(ours, 5e-6, rollout * steps) == pytest.approx(rate(theirs, 5e-6, rollout))
    assert (ours["lr_warmup_iters"], ours["lr_decay_iters"]) == (13 * steps, 1000 * steps)
    path = "policy.megatron_cfg.scheduler.lr_warmup_iters"
    assert told(result, path) == ([Kind.CHANGED] if steps > 1 else [])


def test_a_critic_and_dtensor_tick_as_often(migrated):
    value = {"value.scheduler.lr_warmup_iters", "value.megatron_cfg.scheduler.lr_warmup_iters"}
    changes = """
ppo: {num_prompts_per_step: 16, num_generations_per_prompt: 4}
policy: {train_global_batch_size: 16}
value: {megatron_cfg: {scheduler: {lr_warmup_iters: 10}}}"""
    result = migrated(changes, "ppo_math_1B_megatron")
    assert value_at(result.draft.tree, "value.scheduler.lr_warmup_iters") == 40
    assert any(told(result, path) == [Kind.CHANGED] for path in value)
    dtensor = migrated(
        "grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16}\npolicy: {train_global_batch_size: 128}",
        "grpo_math_1B",
    )
    assert value_at(dtensor.draft.tree, "policy.megatron_cfg.scheduler.lr_warmup_iters") == 200


def test_a_response_has_what_its_prompt_leaves(migrated):
    """There a response ends at vLLM's max_model_len, or after max_new_tokens."""
    result = migrated()
    assert result.config is not None
    policy = result.config.policy
    assert result.config.max_prompt_length == policy.max_total_sequence_length - 1
    total, new = policy.max_total_sequence_length, policy.generation.max_new_tokens
    assert (total, new) == tuple(
        value_at(result.read.tree, f"policy.{key}")
        for key in ("max_total_sequence_length", "generation.max_new_tokens")
    )
    sampling = Sampling.of(policy, (), greedy=False)
    for prompt in (1, 200, total - 1):
        assert sampling.bound([0] * prompt) == min(new, total - prompt)


def test_without_the_key_a_whole_response_is_reserved(exemplar):
    config = load_config(exemplar)
    new, total = config.policy.generation.max_new_tokens, config.policy.max_total_sequence_length
    assert config.policy.reserved_tokens == new
    assert config.policy.longest_of_prompt is None
    assert config.max_prompt_length + new <= total


@pytest.mark.parametrize("loop", ["grpo", "ppo", "dpo", "sft", "distillation"])
def test_every_default_that_is_not_ours_is_written_where_a_recipe_says_nothing(loop):
    """The values are those of NeMo RL's classes; what equals ours is left out."""
    theirs = _OF_LOOPS[loop]
    draft = Draft(loop, {loop: {}, "policy": {}})
    write_defaults(draft)
    kind = RUN_CONFIGS[loop]
    for key, value in theirs.items():
        path = f"{loop}.{key}"
        field = field_at(path, kind)
        assert field is not None
        assert draft.get(path) == value or field.default == value
        assert (path in {note.path for note in draft.notes}) == (field.default != value)


@pytest.mark.parametrize(
    ("changes", "path", "value"),
    [
        ("grpo: {max_val_samples: 500, val_batch_size: 256}", "grpo.max_val_samples", 256),
        ("grpo: {max_val_samples: 480, val_batch_size: 32}", "grpo.max_val_samples", 480),
        ("grpo: {val_period: -1}", "grpo.val_period", 0),
        ("", "grpo.val_greedy", False),
        ("grpo: {val_period: 0, val_at_start: false, val_at_end: false}", "grpo.val_greedy", None),
        ("grpo: {val_num_generations_per_prompt: 4}", "grpo.val_num_generations_per_prompt", 4),
        ("", "env.math.unparsable", "zero"),
        ("", "policy.offload", "all"),
        ("", "policy.generation.compare_at_start", False),
        ("policy: {generation: {backend: megatron}}", "policy.offload", None),
        ("policy: {generation: {colocated: {enabled: false}}}", "policy.offload", None),
        ("grpo: {seq_logprob_error_threshold: 1.5}", "policy.generation.mismatch.threshold", 1.5),
        ("grpo: {seq_logprob_error_threshold: 1.5}", "policy.generation.mismatch.action", "mask"),
        ("grpo: {advantage_clip_low: -5}", "grpo.advantage_clip_low", -5),
        (
            "policy: {generation: {vllm_kwargs: {max_num_seqs: 32}}}",
            "policy.generation.vllm_kwargs.max_num_seqs",
            32,
        ),
        (
            "policy: {generation: {vllm_kwargs: {moe_backend: triton}}}",
            "policy.generation.vllm_kwargs",
            {"moe_backend": "triton"},
        ),
        ("cluster: {segment_size: 4}", "cluster.segment_size", None),
        ("data: {shuffle: false}", "data.shuffle", False),
        ("grpo: {val_batch_size: null, max_val_samples: null}", "grpo.val_batch_size", None),
        ("policy: {megatron_cfg: {mtp_num_layers: 2}}", "policy.model.mtp_num_layers", 2),
        (
            "policy: {megatron_cfg: {mtp_num_layers: 2, mtp_loss_scaling_factor: 0.3}}",
            "policy.model.mtp_loss_scaling_factor",
            0.3,
        ),
        (
            "grpo: {val_num_generations_per_prompt: 4, val_period: 0, val_at_start: false}",
            "grpo.val_greedy",
            False,
        ),
        (
            "policy: {sequence_packing: {enabled: false, algorithm: odd}}",
            "policy.sequence_packing.algorithm",
            None,
        ),
        (
            "checkpointing: {enabled: false, checkpoint_must_save_by: '00:03:45:00'}",
            "checkpointing.checkpoint_must_save_by",
            None,
        ),
        (
            "policy: {megatron_cfg: {distributed_data_parallel_config: {overlap_grad_reduce: false, "
            "overlap_param_gather: true}}}",
            "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather",
            False,
        ),
        (
            "policy: {generation: {backend: trtllm, trtllm_cfg: {tensor_parallel_size: 4}}}",
            "policy.generation.vllm_cfg.tensor_parallel_size",
            4,
        ),
        *(
            ("policy: {generation: {vllm_cfg: {precision: fp8}}}", f"policy.generation.{key}", False)
            for key in ("verify_refit", "compare_at_start")
        ),
        (
            "policy: {generation: {vllm_cfg: {pipeline_parallel_size: 2, expert_parallel_size: 1}}}",
            "policy.generation.vllm_cfg.pipeline_parallel_size",
            2,
        ),
        (
            "policy: {generation: {backend: sglang, sglang_cfg: {tp_size: 2}}}",
            "policy.generation.vllm_cfg.tensor_parallel_size",
            2,
        ),
        (
            "grpo: {use_leave_one_out_baseline: false, adv_estimator: {use_leave_one_out_baseline: true}}",
            "grpo.use_leave_one_out_baseline",
            True,
        ),
        (
            "policy: {dtensor_cfg: {enabled: true}, megatron_cfg: {distributed_data_parallel_config: "
            "{grad_reduce_in_fp32: false}}, optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1.0e-6}}}",
            "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32",
            True,
        ),
        (
            "policy: {dtensor_cfg: {enabled: true}, optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1.0e-6}}}",
            "policy.megatron_cfg.optimizer.weight_decay",
            0.01,  # torch's own default
        ),
        (
            "policy: {dtensor_cfg: {enabled: true}, optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1.0e-6}}}",
            "policy.megatron_cfg.optimizer.decay_norms_and_biases",
            True,
        ),
        ("", "policy.megatron_cfg.optimizer.decay_norms_and_biases", None),
    ],
)
def test_the_effective_value_is_theirs(migrated, changes, path, value):
    assert value_at(migrated(changes).draft.tree, path) == value


@pytest.mark.parametrize("base", ["dpo-qwen2.5-math7b-1n8g-megatron_fused_linear_logprobs"])
def test_a_validation_of_given_answers_asks_for_none(migrated, base):
    config = migrated("", base).config
    assert config is not None
    assert config.loop.max_val_samples == 0
    assert config.loop.validates


@pytest.mark.parametrize(
    ("loop", "changes", "samples", "per_pass"),
    [
        ("sft", "", 8 * 32, 1),
        ("sft", "sft: {val_batches: 4, val_global_batch_size: 128, val_micro_batch_size: 2}", 4 * 128, 2),
        ("dpo", "dpo: {val_batches: -1, val_global_batch_size: 16}", None, 1),
        ("dpo", "dpo: {val_batches: 0}", None, 1),
        ("dpo", "", 8 * 8, 1),
    ],
)
def test_a_validation_takes_the_loss_of_the_rows_that_it_takes_there(
    migrated, loop, changes, samples, per_pass
):
    result = migrated(changes, f"{loop}-qwen2.5-math7b-1n8g-megatron_fused_linear_logprobs")
    assert result.config is not None
    assert result.config.val_loss_samples == samples
    assert result.config.given_rows.val_micro_batch_size == per_pass
    lost = (Kind.REFUSED, Kind.OPEN, Kind.WARNED)
    assert not any(note.kind in lost for note in result.draft.notes if note.path.startswith(f"{loop}.val_"))


SFT, DPO = (f"{name}-qwen2.5-math7b-1n8g-megatron_fused_linear_logprobs" for name in ("sft", "dpo"))


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        (SFT, "", (True, True, "to_turn_end")),
        (SFT, "data: {add_generation_prompt: false, add_bos: false}", (False, True, "turn")),
        (SFT, "data: {add_eos: false}", (True, False, "to_turn_end")),
        (DPO, "", (True, True, "turn")),
        (DPO, "data: {add_generation_prompt: true, add_eos: false}", (True, True, "turn")),
        ("grpo_math_1B_megatron", "data: {add_bos: true}", (False, False, "answer")),
    ],
)
def test_of_a_given_answer_is_trained_what_is_trained_there(migrated, base, changes, expected):
    """data/llm_message_utils.py: SFT passes what the recipe says, DPO the defaults, and prompts get nothing."""
    config = migrated(changes, base).config
    assert config is not None
    assert (config.data.add_bos, config.data.add_eos, config.data.imitated) == expected


@pytest.mark.parametrize(
    ("given", "column"), [("", "tools"), ("tool_key: functions", "functions"), ("tool_key: null", None)]
)
def test_tools_of_a_conversation_stand_where_they_stand_there(migrated, given, column):
    """data/datasets/response_datasets/oai_format_dataset.py: a column of functions, `tools` unless it is named."""
    source = f"dataset_name: openai_format, data_path: rows.jsonl, chat_key: messages, {given}"
    result = migrated(f"data: {{train: {{{source}}}}}", SFT)
    assert result.config is not None
    assert result.config.data.train.tool_key == column
    assert told(result, "data.train.tool_key") == []


@pytest.mark.parametrize(("base", "read"), [(SFT, False), (DPO, False), ("grpo_math_1B_megatron", True)])
def test_a_system_prompt_is_shown_where_answers_are_sampled(migrated, base, read):
    """data/processors.py: sft_processor and preference_preprocessor read the prompt of a task alone."""
    result = migrated("data: {default: {system_prompt_file: examples/prompts/math.txt}}", base)
    assert (value_at(result.draft.tree, "data.default.system_prompt_file") is not None) == read
    assert ("data.default.system_prompt_file" in result.draft.dropped) != read


@pytest.mark.parametrize("default", ["examples/prompts/cot.txt", None])
def test_a_validation_has_the_texts_of_the_defaults_and_not_of_the_rows_to_train_on(migrated, default):
    """data/utils.py: `update_single_dataset_config(cfg, data_config["default"])`, for each source alike."""
    written = "null" if default is None else default
    train = "train: {dataset_name: DeepScaler, prompt_file: examples/prompts/math.txt}"
    held_out = "validation: {dataset_name: AIME2024}"
    result = migrated(f"data: {{default: {{prompt_file: {written}}}, {train}, {held_out}}}")
    assert result.config is not None
    shown = {path: source.prompt_file for path, source in result.config.validation_sources.items()}
    assert [name and name.rpartition("/")[2] for name in shown.values()] == [default and "cot.txt"]


UNKNOWN = "policy: {{model_name: nobody/has-this, megatron_cfg: {{{}}}}}"


@pytest.mark.parametrize("key", ["moe_router_dtype: fp64", "moe_router_load_balancing_type: none"])
def test_nothing_is_neutral_that_rests_on_a_model_that_is_not_known(migrated, key):
    result = migrated(UNKNOWN.format(key))
    path = f"policy.megatron_cfg.{key.partition(':')[0]}"
    assert path not in result.draft.dropped
    assert told(result, path) == [Kind.REFUSED]


@pytest.mark.parametrize("layers", ["0", "null"])
def test_without_prediction_layers_nothing_reads_their_keys_whatever_the_model(migrated, layers):
    """models/megatron/setup.py, _apply_mtp_config: the number there takes the place of the model's own."""
    result = migrated(UNKNOWN.format(f"mtp_num_layers: {layers}, mtp_loss_scaling_factor: 0.3"))
    assert "policy.megatron_cfg.mtp_loss_scaling_factor" in result.draft.dropped
    own = migrated(UNKNOWN.format("mtp_num_layers: 1, mtp_use_repeated_layer: true, mtp_detach_heads: true"))
    for key in ("mtp_num_layers", "mtp_use_repeated_layer", "mtp_detach_heads"):
        assert told(own, f"policy.megatron_cfg.{key}") == [Kind.REFUSED]


@pytest.mark.parametrize(
    ("sampling", "same"),
    [("temperature: 1.0", True), ("temperature: 0.7", False), ("top_k: 5", False), ("top_p: 0.9", False)],
)
def test_raw_logprobs_are_those_of_plain_sampling(migrated, sampling, same):
    result = migrated(f"policy: {{generation: {{{sampling}, vllm_cfg: {{logprobs_mode: raw_logprobs}}}}}}")
    path = "policy.generation.vllm_cfg.logprobs_mode"
    assert (path in result.draft.dropped) == same
    assert (path in result.draft.refused) != same


@pytest.mark.parametrize("lr", ["null", "fast", "[1]"])
def test_a_rate_that_is_no_number_is_refused(migrated, lr):
    changes = (
        "policy: {dtensor_cfg: {enabled: true}, scheduler: [{name: LinearLR, kwargs: {start_factor: 0.1}}], "
        f"optimizer: {{name: torch.optim.AdamW, kwargs: {{lr: {lr}}}}}}}"
    )
    assert told(migrated(changes), "policy.optimizer.kwargs.lr") == [Kind.REFUSED]


@pytest.mark.parametrize("key", ["speculative_config: {method: mtp}", "hf_overrides: {a: 1}", "model: x"])
def test_what_gives_other_answers_is_not_passed_on(migrated, key):
    result = migrated(f"policy: {{generation: {{vllm_kwargs: {{{key}, enable_chunked_prefill: true}}}}}}")
    name = key.partition(":")[0]
    assert told(result, f"policy.generation.vllm_kwargs.{name}") == [Kind.REFUSED]
    assert value_at(result.draft.tree, "policy.generation.vllm_kwargs") == {"enable_chunked_prefill": True}


def test_a_huge_number_of_samples_is_refused_at_once(migrated):
    begin = time.monotonic()
    result = migrated("grpo: {num_prompts_per_step: 100000000}\npolicy: {train_global_batch_size: 7}")
    assert told(result, "policy.train_global_batch_size") == [Kind.OPEN]
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    ("wanted", "number", "ranks", "found"), [(7, 64, 8, 8), (20, 64, 8, 16), (64, 64, 1, 64)]
)
def test_the_nearest_divisor(wanted, number, ranks, found):
    assert divisor_near(wanted, number, ranks) == found


def test_rows_are_held_out_where_they_are_there(migrated):
    changes = "data: {train: {_override_: true, dataset_name: DAPOMath17K}, validation: null}\ngrpo: {val_period: 5}"
    tree = migrated(changes).draft.tree
    assert value_at(tree, "data.train.split_validation_size") == 0
    assert value_at(tree, "grpo.val_period") == 0, "there are no rows to validate with"
    given = migrated(changes.replace("DAPOMath17K", "OpenMathInstruct-2")).draft.tree
    assert value_at(given, "data.train.split_validation_size") is None, "5 % there and here"
    assert value_at(given, "grpo.val_period") == 5


def test_ties_are_kept(migrated):
    result = migrated("", "dpo-qwen2.5-math7b-1n8g-megatron_fused_linear_logprobs")
    assert value_at(result.draft.tree, "data.train.ties") == "keep"
    row = {"context": "?", "response1": "a", "response2": "b", "overall_preference": 0}
    for ties, found in (("keep", ("a", "a")), ("drop", None)):
        source = SourceConfig.model_validate({"data_path": "x", "ties": ties})
        read = RowReader(source, RowKind.PAIRS, chat=False).read(Row("rows:1", row))
        assert (None if read is None else (read.answer, read.rejected)) == found


def test_a_constant_weight_decay_is_the_schedules(migrated):
    schedule = "start_weight_decay: 0.1, end_weight_decay: 0.1, weight_decay_incr_style: constant"
    changes = f"policy: {{megatron_cfg: {{optimizer: {{weight_decay: 0.01}}, scheduler: {{{schedule}}}}}}}"
    config = migrated(changes).config
    assert config is not None
    assert config.policy.megatron_cfg.optimizer.weight_decay == 0.1


def test_a_weight_decay_that_changes_is_told_to_end_elsewhere(migrated):
    schedule = "start_weight_decay: 0.0, end_weight_decay: 0.1, weight_decay_incr_style: linear"
    result = migrated(f"policy: {{megatron_cfg: {{scheduler: {{{schedule}}}}}}}")
    assert told(result, "policy.megatron_cfg.scheduler.end_weight_decay") == [Kind.CHANGED]


@pytest.mark.parametrize(("action", "stall"), [("warn", None), ("abort", 600.0)])
def test_failures_of_the_single_controller(migrated, action, stall):
    changes = f"async_rl: {{stall_watchdog: {{stall_action: {action}}}}}"
    result = migrated(changes, "grpo_math_1B_megatron_single_controller")
    own = value_at(result.draft.tree, "grpo.async_grpo")
    assert own["max_generation_failures"] == 4, "5 attempts"
    assert own.get("stall_timeout_s") == stall
    assert result.settled


def test_prompts_that_are_given_up_on_are_refused(migrated):
    changes = "async_rl: {rollout_failure: {max_skipped_prompts: 3}}"
    result = migrated(changes, "grpo_math_1B_megatron_single_controller")
    assert told(result, "async_rl.rollout_failure") == [Kind.REFUSED]


GYM = """
env:
  should_use_nemo_gym: true
  nemo_gym:
    config_paths: [resources_servers/a/configs/a.yaml]
    is_trajectory_collection: false
    effort_levels: {low_weight: 0.0}
    invalid_tool_call_patterns: [<tool_call>]
    policy_model: {responses_api_models: {vllm_model: {uses_reasoning_parser: false}}}
grpo: {max_rollout_turns: 1}
policy: {generation: {vllm_cfg: {async_engine: true, expose_http_server: true, http_server_serving_chat_kwargs: {
  enable_auto_tools: true, tool_parser: hermes}}}}
data:
  train: {data_path: rows.jsonl, dataset_name: null, split: null}
  validation: null
  default: {dataset_name: NemoGymDataset, env_name: nemo_gym, processor: nemo_gym_data_processor, prompt_file: null}
"""


def test_nemo_gym_is_passed_on_without_what_nemo_rl_reads_of_it(migrated):
    """As environments/nemo_gym.py does before it starts the servers."""
    result = migrated(GYM)
    tree = result.draft.tree
    assert value_at(tree, "env.nemo_gym") == {
        "config_paths": ["resources_servers/a/configs/a.yaml"],
        "policy_model": {"responses_api_models": {"vllm_model": {"uses_reasoning_parser": False}}},
    }
    assert value_at(tree, "env.math") is None
    assert value_at(tree, "env.endpoint.tool_parser") == "hermes"
    assert value_at(tree, "grpo.max_rollout_turns") > 100
    assert value_at(tree, "data.train.dataset_name") == "NemoGymDataset"
    assert [note.path for note in result.draft.notes if note.kind is Kind.REFUSED] == []
    assert result.config is not None
    assert result.config.env.endpoint is not None
    assert result.config.import_paths == {}


def test_nemo_gym_that_is_not_used_is_left_out(migrated):
    result = migrated("env: {should_use_nemo_gym: false, nemo_gym: {config_paths: [a.yaml]}}")
    assert value_at(result.draft.tree, "env.nemo_gym") is None
    assert result.config is not None
    assert result.config.env.endpoint is None
