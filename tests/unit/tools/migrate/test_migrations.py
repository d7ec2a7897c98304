"""What a key of NeMo RL does there, and what the migrated recipe does here: rows of migrations.yaml, values."""

import time
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from migrations import FOLDER, told
from refusals import briefs

from nemo_rl_mcore.config.base import value_at
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.data.rows import Row, RowReader
from nemo_rl_mcore.engine.engine import Sampling
from nemo_rl_mcore.ops.sampling import bound_of
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.recipe.rules.batching import divisor_near
from nemo_rl_mcore.recipe.schema import field_at
from nemo_rl_mcore.tools.migrate.draft import Draft, Kind
from nemo_rl_mcore.tools.migrate.meaning import _OF_LOOPS, write_defaults
from nemo_rl_mcore.tools.migrate.migrate import migrate, recipe_text

ROWS = yaml.safe_load(Path(__file__).with_name("migrations.yaml").read_text())
AS_TEXT = ("data.apply_chat_template=false", "data.special_tokens_in_content=text")
ASYNCHRONOUS = (
    "policy.generation.colocated.enabled=false",
    "loss_fn.use_importance_sampling_correction=true",
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.get("set") or row.get("theirs", ""))[:60])
def test_a_recipe_becomes_what_the_file_says(row, migrated, exemplar):
    if "set" in row:
        recipe = exemplar.with_name(row.get("recipe", exemplar.name))
        result = migrate(recipe, (*AS_TEXT, *row["set"], *ASYNCHRONOUS))
    else:
        base = row.get("base", "grpo_math_1B_megatron")
        result = migrated(yaml.safe_dump(row["theirs"]) if "theirs" in row else "", base)
    draft = result.draft
    ours = {path: value_at(draft.tree, path) for path in row.get("ours", {})}
    for path, value in ours.items():
        ours[path] = value.removeprefix(f"{FOLDER}/") if isinstance(value, str) else value
    assert ours == row.get("ours", {})
    assert {path: attrgetter(path)(result.config) for path in row.get("config", {})} == row.get("config", {})
    text = recipe_text(result, "theirs.yaml")
    for path, kinds in row.get("told", {}).items():
        assert [kind.name.lower() for kind in told(result, path)] == kinds
        assert not {"refused", "open"} & {*kinds} or not result.settled
        assert ("refused" in kinds) == (f"\n# Refused: {path}: " in text) == (path in draft.refused)
    assert {*row.get("dropped", ())} <= {*draft.dropped}
    assert {*row.get("problems", ())} <= {*briefs(result.problems)}
    assert row.get("only", (found := briefs(result.problems))) == found
    assert not row.get("settled") or result.settled
    if "quiet" in row:
        lost = (Kind.REFUSED, Kind.OPEN, Kind.WARNED)
        assert not [one for one in draft.notes if one.kind in lost and one.path.startswith(row["quiet"])]


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
        assert bound_of(sampling.max_new_tokens, sampling.longest, prompt) == min(new, total - prompt)


def test_without_the_key_a_whole_response_is_reserved(exemplar):
    config = load_config(exemplar)
    new, total = config.policy.generation.max_new_tokens, config.policy.max_total_sequence_length
    assert config.policy.reserved_tokens == new
    assert not config.policy.generation.fit_to_sequence
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


def test_ties_are_kept(migrated):
    result = migrated("", "dpo-qwen2.5-math7b-1n8g-megatron_fused_linear_logprobs")
    assert value_at(result.draft.tree, "data.train.ties") == "keep"
    row = {"context": "?", "response1": "a", "response2": "b", "overall_preference": 0}
    for ties, found in (("keep", ("a", "a")), ("drop", None)):
        source = SourceConfig.model_validate({"data_path": "x", "ties": ties})
        read = RowReader(source, RowKind.PAIRS, chat=False).read(Row("rows:1", row))
        assert (None if read is None else (read.answer, read.rejected)) == found


GYM = """
env:
  should_use_nemo_gym: true
  nemo_gym:
    config_paths: [resources_servers/a/configs/a.yaml]
    is_trajectory_collection: false
    effort_levels: {low_weight: 0.0}
    invalid_tool_call_patterns: [<tool_call>, </tool_call>, <function_call>, </function_call>]
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
