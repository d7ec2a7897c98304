"""What `check` says of engines and of asynchronous rollouts."""

from io import StringIO

import pytest
from rich.console import Console

from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.check.render import render, sections_of

GENERATION = "policy.generation"
APART = f"{GENERATION}.colocated.enabled=false"
RUN = (APART, "grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")
VLLM = (f"{GENERATION}.backend=vllm", "policy.model.num_attention_heads=2")


@pytest.fixture(autouse=True)
def all_packages(monkeypatch):
    monkeypatch.setattr("nemo_rl_mcore.tools.check.machine.installed", lambda _package: True)


def shown(plan) -> str:
    console = Console(file=StringIO(), width=120)
    console.print(render(sections_of(plan)), soft_wrap=True)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        ([], "on the training ranks"),
        (["cluster.gpus_per_node=2"], "on the training ranks"),
        ([APART], "1 embedded engine, in processes beside the ranks"),
        (
            [APART, f"{GENERATION}.engines=3", "cluster.gpus_per_node=2"],
            "3 embedded engines, on GPUs beside those of the ranks",
        ),
        ([*VLLM, f"{GENERATION}.engines=2"], "2 vLLM engines, in processes beside the ranks"),
        ([*VLLM, "cluster.gpus_per_node=2"], "2 vLLM engines, on the ranks' GPUs, taking turns"),
        (
            [
                *(*VLLM, APART, "cluster.gpus_per_node=2", f"{GENERATION}.vllm_cfg.tensor_parallel_size=2"),
                f"{GENERATION}.colocated.resources={{gpus_per_node: 4, num_nodes: 3}}",
            ],
            "6 vLLM engines of 2 processes each, on GPUs beside those of the ranks",
        ),
        (
            [
                *(*VLLM, "cluster.gpus_per_node=2", "cluster.num_nodes=4"),
                f"{GENERATION}.vllm_cfg.tensor_parallel_size=4",
            ],
            "2 vLLM engines of 4 processes on 2 machines each, on the ranks' GPUs, taking turns",
        ),
    ],
)
def test_where_engines_live(load, overrides, where):
    plan = preflight(load(*overrides))
    assert plan.engines.where == where
    assert f"  generation              {where}\n" in shown(plan)


def test_an_engine_holds_the_whole_model_however_the_ranks_cut_it(load):
    memory = preflight(
        load(
            APART,
            "policy.megatron_cfg.tensor_model_parallel_size=2",
        )
    ).engines.memory
    assert memory.parameters == 86336
    assert (memory.weights, memory.buckets, memory.total) == (86336 * 4, 2 << 26, 86336 * 4 + (2 << 26))


@pytest.mark.parametrize("recipe", ["grpo_copy_cpu", "ppo_cpu", "sft_cpu"])
def test_a_run_that_takes_turns_has_nothing_under_way(exemplar, recipe):
    plan = preflight(load_config(exemplar.with_name(f"{recipe}.yaml")))
    assert plan.asynchronous is None
    assert "Asynchronous rollouts" not in shown(plan)


def test_what_is_under_way_and_kept(load):
    plan = preflight(
        load(
            *(*RUN, "grpo.async_grpo.max_trajectory_age_steps=2", "grpo.async_grpo.max_inflight_prompts=20"),
            *("checkpointing.enabled=true", "checkpointing.save_period=5"),
        )
    ).asynchronous
    assert plan.kept_groups == 5 * 16
    # 16 answers of 8 tokens to each prompt, 40 bytes a token.
    assert plan.driver_bytes == (5 * 16 + 3 * 16) * 16 * 8 * 40


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (["checkpointing.enabled=false"], 0),
        (["checkpointing.enabled=true", "checkpointing.save_period=50", "grpo.max_num_steps=3"], 3 * 16),
    ],
)
def test_groups_are_kept_until_the_next_checkpoint(load, overrides, kept):
    assert preflight(load(*RUN, *overrides)).asynchronous.kept_groups == kept


def test_kept_groups_have_their_disk(load):
    saving = ("checkpointing.enabled=true", "checkpointing.save_period=20", "grpo.max_num_steps=240")
    assert preflight(load(*RUN, *saving)).asynchronous.disk_bytes == 240 * 16 * 16 * 8 * 40
