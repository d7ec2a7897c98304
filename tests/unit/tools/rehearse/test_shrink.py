"""Every recipe of the package, and every one of theirs that migrates, has a rehearsal that the rules allow."""

from pathlib import Path

import pytest
from rehearsals import REPO, THEIRS

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.base import ConfigError, value_at
from nemo_rl_mcore.models import count_parameters
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.migrate.draft import put
from nemo_rl_mcore.tools.rehearse.command import read_rehearsed
from nemo_rl_mcore.tools.rehearse.runs import loaded
from nemo_rl_mcore.tools.rehearse.schedule import Schedule
from nemo_rl_mcore.tools.rehearse.shrink import engines_of, layouts_of, rollout_steps, shrinks, shrunk

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
    assert dropped == {
        f"{ENGINE}.precision": ("int8", None),
        f"{ENGINE}.kv_cache_dtype": ("int8", None),
    }
    assert read_rehearsed(recipe, []).of_vllm == ()


def test_a_recipe_that_also_trains_a_draft_model_is_refused_with_every_problem() -> None:
    overrides = [f"{ENGINE}.precision=int8", f"++{TRAINER}={{enabled: true}}"]
    with pytest.raises(ConfigError) as refused:
        read_rehearsed(str(THEIRS / "grpo_math_1B_megatron.yaml"), overrides)
    assert {one.path for one in refused.value.problems} >= {f"{ENGINE}.precision", TRAINER}
