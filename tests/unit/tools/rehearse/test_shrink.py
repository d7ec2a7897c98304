"""Every recipe has a rehearsal that the rules allow: its rows, its schedule, its layouts, and what is shrunk in it."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.base import ConfigError, value_at
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.source import KNOWN, SourceConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.rows import Row, RowReader
from nemo_rl_mcore.models import count_parameters
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.migrate.draft import put
from nemo_rl_mcore.tools.rehearse.command import read_rehearsed
from nemo_rl_mcore.tools.rehearse.proofs import Refused, Twins, critic_on_one_rank
from nemo_rl_mcore.tools.rehearse.runs import Ran, loaded
from nemo_rl_mcore.tools.rehearse.schedule import Schedule
from nemo_rl_mcore.tools.rehearse.shrink import (
    LONGEST,
    ROWS,
    Sharing,
    engines_of,
    is_here,
    layouts_of,
    made_source,
    rollout_steps,
    shrinks,
    shrunk,
)

REPO = Path(__file__).parents[4]
THEIRS = REPO / "tests/fixtures/nemo_rl"
OURS = sorted((REPO / "examples/configs").rglob("*.yaml"))
RECIPES = [*OURS, *sorted(THEIRS.glob("*.yaml"))]
UNKNOWN_MODEL = {"distillation_math_megatron"}
DENSE = REPO / "examples/configs/grpo_math_7B.yaml"

KEPT = (
    *("policy.sequence_packing.enabled", "policy.dynamic_batching.enabled"),
    *("policy.megatron_cfg.use_fused_linear_logprobs", "policy.megatron_cfg.freeze_moe_router"),
    *("policy.megatron_cfg.scheduler", "policy.model.qk_layernorm", "policy.model.add_qkv_bias"),
    "policy.model.tie_word_embeddings",
)


def small_of(config: RunConfig, folder: Path, number: int = 0, ranks: int = 4) -> RunConfig:
    small = shrunk(config, layouts_of(config, ranks), number, folder)
    if value_at(small.tree, "teacher") is not None:  # its weights are made before a rehearsal
        put(small.tree, "teacher.model_name", None)
        put(small.tree, "teacher.init_checkpoint", str(folder))
    return loaded(small.tree)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_shrunk_recipe_is_allowed(recipe: Path, ranks: int, tmp_path: Path) -> None:
    if recipe.stem in UNKNOWN_MODEL:
        with pytest.raises(ConfigError):
            read_rehearsed(str(recipe), [])
        return
    config = read_rehearsed(str(recipe), []).config
    for number, layout in enumerate(layouts_of(config, ranks)):
        folder = tmp_path / str(number)
        folder.mkdir()
        small = small_of(config, folder, number, ranks)
        if "teacher" not in small.models:
            preflight(small, elsewhere=False, of_a_run=True)
        assert small.cluster.world_size == layout.ranks <= ranks
        assert count_parameters(small.policy.model) < 2_000_000
        assert small.algorithm == config.algorithm
        assert (small.asynchronous, small.streams) == (config.asynchronous, config.streams)
        assert (small.max_rollout_turns > 1) == (config.max_rollout_turns > 1)
        for key in KEPT:
            assert value_at(small, key) == value_at(config, key), key
        if rollout_steps(config) <= 4:
            assert rollout_steps(small) == rollout_steps(config)
        own = engines_of(config) if not config.policy.generation.decodes_on_ranks else 0
        assert small.policy.generation.engines == (min(2, own) or 1)


def test_each_shrink_is_told(tmp_path: Path) -> None:
    config = read_rehearsed(str(DENSE), ["policy.megatron_cfg.tensor_model_parallel_size=4"]).config
    small = shrunk(config, layouts_of(config, 4), 0, tmp_path)
    told = {one.path: one for one in shrinks(config, loaded(small.tree), small.why)}
    assert told["policy.model.hidden_size"].was == 3584
    assert told["policy.model.hidden_size"].now == 32
    assert told["policy.megatron_cfg.tensor_model_parallel_size"].now == 2
    assert told["env.rewards"].why
    assert "policy.generation.vllm_cfg.async_engine" not in told


def test_rows_name_the_environment_that_replaces_theirs(tmp_path: Path) -> None:
    named = "++data.default.env_name=math"
    small = small_of(read_rehearsed(str(THEIRS / "grpo_math_1B_megatron.yaml"), [named]).config, tmp_path)
    assert small.env.given == ["rewards"]
    assert {source.env_name for source in (small.train_sources | small.validation_sources).values()} == {
        "rewards"
    }


def test_their_schedule_is_read_from_their_recipe() -> None:
    theirs = read_rehearsed(str(THEIRS / "grpo_math_1B_megatron.yaml"), [])
    ours = theirs.config.policy.megatron_cfg
    assert theirs.schedule.steps_per_tick == rollout_steps(theirs.config)
    again = Schedule.of(ours.model_dump())
    assert [theirs.schedule.rate(step) for step in range(40)] == pytest.approx(
        [again.rate(step) for step in range(40)]
    )


ENGINE = "policy.generation.vllm_cfg"
TRAINER = "policy.draft"


def test_what_only_vllm_refuses_is_dropped_with_vllm() -> None:
    recipe = str(THEIRS / "grpo_math_1B_megatron.yaml")
    read = read_rehearsed(recipe, [f"{ENGINE}.precision=int8", f"{ENGINE}.kv_cache_dtype=int8"])
    dropped = {one.path: (one.was, one.now) for one in read.of_vllm}
    assert dropped == {f"{ENGINE}.precision": ("int8", None), f"{ENGINE}.kv_cache_dtype": ("int8", None)}
    assert read_rehearsed(recipe, []).of_vllm == ()


def test_a_recipe_that_also_trains_a_draft_model_is_refused_with_every_problem() -> None:
    overrides = [f"{ENGINE}.precision=int8", f"++{TRAINER}={{enabled: true}}"]
    with pytest.raises(ConfigError) as refused:
        read_rehearsed(str(THEIRS / "grpo_math_1B_megatron.yaml"), overrides)
    assert {one.path for one in refused.value.problems} >= {f"{ENGINE}.precision", TRAINER}


# Rows

ANSWERED = [{"dataset_name": name} for name in sorted({*KNOWN} - {"helpsteer3", "tulu3_preference"})]
OTHERS = [
    {"data_path": "x/y", "input_key": "a.b", "output_key": "a.c", "answer": {"regex": "is (.*)"}},
    {"data_path": "x/y", "output_key": None, "columns": ["level"]},
]


def read_made(keys: dict[str, object], kind: RowKind, folder: Path) -> list[Prompt]:
    section = made_source(SourceConfig.model_validate(keys), kind, folder / "rows.jsonl")
    source = SourceConfig.model_validate(section)
    assert is_here(source)
    reader = RowReader(source, kind, chat=True)
    lines = (folder / "rows.jsonl").read_text().splitlines()
    found = [reader.read(Row("rows", json.loads(line))) for line in lines]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("keys", [*ANSWERED, *OTHERS], ids=str)
def test_made_prompts_are_read_as_the_source_s_own_are(keys: dict[str, object], tmp_path: Path) -> None:
    found = read_made(keys, RowKind.PROMPTS, tmp_path)
    assert len({one.context or one.text for one in found}) == ROWS
    assert all(len(one.context or one.text) <= LONGEST and not one.unscored for one in found)


@pytest.mark.parametrize("name", ["helpsteer3", "tulu3_preference"])
def test_made_pairs_are_too(name: str, tmp_path: Path) -> None:
    found = read_made({"dataset_name": name}, RowKind.PAIRS, tmp_path)
    assert len(found) == ROWS
    assert all(one.answer != one.rejected for one in found)


def test_rows_of_the_hub_are_not_here() -> None:
    assert not is_here(SourceConfig(dataset_name="gsm8k", data_path="openai/gsm8k"))


# Schedules


class Groups:
    def __init__(self) -> None:
        self.param_groups: list[dict[str, float]] = [{}]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_a_schedule_has_the_closed_form_of_megatrons_own_which_trains(style: str, warmup: int) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    form = Schedule(3e-3, 3e-4, style, warmup, 1e-4, 9)
    steps = 8
    groups: Any = Groups()
    scheduler = OptimizerParamScheduler(
        groups,
        init_lr=1e-4,
        max_lr=3e-3,
        min_lr=3e-4,
        lr_warmup_steps=warmup * steps,
        lr_decay_steps=9 * steps,
        lr_decay_style=style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=9 * steps,
        wd_incr_style="constant",
    )
    found: list[float] = []
    for _ in range(12):
        found.append(scheduler.get_lr(groups.param_groups[0]))
        scheduler.step(steps)
    assert found == pytest.approx([form.rate(step) for step in range(12)], rel=1e-12)


# Layouts

SHARED = ("tensor", "pipeline", "context", "expert")


@cache
def _plain() -> RunConfig:
    return load_config(REPO / "examples/configs/quickstart/grpo_7B_8gpu.yaml")


def with_layout(world: int = 1, virtual: int | None = None, **sizes: int) -> RunConfig:
    """A recipe with another layout; nothing is checked of it."""
    config = _plain()
    keys = {
        "tensor_model_parallel_size": sizes.get("tensor", 1),
        "pipeline_model_parallel_size": sizes.get("pipeline", 1),
        "context_parallel_size": sizes.get("context", 1),
        "expert_model_parallel_size": sizes.get("expert", 1),
        "sequence_parallel": bool(sizes.get("sequence")),
        "virtual_pipeline_model_parallel_size": virtual,
    }
    megatron = config.policy.megatron_cfg.model_copy(update=keys)
    policy = config.policy.model_copy(update={"megatron_cfg": megatron})
    cluster = config.cluster.model_copy(update={"gpus_per_node": world})
    return config.model_copy(update={"policy": policy, "cluster": cluster})


def test_a_run_on_one_rank_is_not_compared_with_itself(tmp_path: Path) -> None:
    ran = Ran({}, Sharing(), tmp_path)
    for proof in (Twins(ran).layout, lambda: critic_on_one_rank(ran)):
        with pytest.raises(Refused):
            proof()


def test_the_split_step_on_one_rank_is_that_rank_s_alone(tmp_path: Path) -> None:
    twins = Twins(Ran({}, Sharing(), tmp_path))
    trained = {"weight": torch.ones(2)}
    of_one_rank = {
        "saved 1": {"weight": torch.zeros(2)},
        "saved 2": trained,
        "train": trained,
        "split": trained,
    }
    twins.__dict__["_plain"] = of_one_rank  # what is computed once
    assert twins.split()


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ({}, 4, [Sharing()]),
        ({"world": 8}, 4, [Sharing(data=2)]),
        ({"world": 8, "tensor": 4, "sequence": True}, 4, [Sharing(data=2, tensor=2, sequence=True)]),
        ({"world": 4, "tensor": 4}, 4, [Sharing(tensor=2)]),
        ({"world": 8, "pipeline": 4, "virtual": 3}, 4, [Sharing(data=2, pipeline=2, virtual=2)]),
        ({"world": 16, "tensor": 2, "pipeline": 4}, 4, [Sharing(tensor=2, pipeline=2)]),
        ({"world": 16, "tensor": 2, "pipeline": 4}, 8, [Sharing(data=2, tensor=2, pipeline=2)]),
        (
            {"world": 16, "tensor": 2, "pipeline": 4, "context": 2},
            4,
            [Sharing(tensor=2, pipeline=2), Sharing(context=2)],
        ),
        ({"world": 16, "expert": 8}, 4, [Sharing(data=2, expert=2)]),
        ({"world": 16, "pipeline": 2, "expert": 8}, 4, [Sharing(data=2, pipeline=2, expert=2)]),
        ({"world": 16, "tensor": 2, "expert": 8}, 4, [Sharing(data=2, tensor=2, expert=2)]),
    ],
)
def test_layouts(given: dict[str, int], ranks: int, expected: list[Sharing], tmp_path: Path) -> None:
    assert layouts_of(with_layout(**given), ranks) == expected


@pytest.mark.parametrize("ranks", [4, 8])
def test_whatever_is_shared_is_shared_by_two_somewhere(ranks: int) -> None:
    for number in range(16):
        sizes = {name: 2 for place, name in enumerate(SHARED) if number >> place & 1}
        found = layouts_of(with_layout(world=16, **sizes), ranks)
        for name in SHARED:
            assert max(getattr(one, name) for one in found) == sizes.get(name, 1), (sizes, found)
        assert all(one.ranks <= ranks for one in found)
        assert all((one.ranks // one.pipeline) % one.expert == 0 for one in found)
