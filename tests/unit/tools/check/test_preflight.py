from io import StringIO

import pytest
from refusals import briefs
from rich.console import Console

from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.driver.run_folder import checkpoints_on_disk
from nemo_rl_mcore.models.memory import estimate_memory
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.check.render import render, sections_of, subject_of

UNFUSED = "policy.megatron_cfg.use_fused_linear_logprobs=false"
ONE_ROW = "policy.megatron_cfg.fused_linear_logprobs_chunk_size=1"
TP2 = "policy.megatron_cfg.tensor_model_parallel_size=2"
CP2 = "policy.megatron_cfg.context_parallel_size=2"
PP2 = "policy.megatron_cfg.pipeline_model_parallel_size=2"
KL = "loss_fn.reference_policy_kl_penalty=0.1"
ALL = ("tensorboard", "transformer_engine", "vllm")


def refused(config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        preflight(config)
    return briefs(caught.value.problems)


def subject(config, **how):
    return {one.name: one.found for one in subject_of(preflight(config, **how))}


def shown(plan, width=120) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(render(sections_of(plan)), soft_wrap=True)
    return console.file.getvalue()


def test_plan_of_the_exemplar(load):
    plan = preflight(load())
    assert plan.transformer_impl == "local"
    batch = plan.batch
    assert (batch.samples, batch.samples_per_rank, batch.optimizer_steps) == (256, 128, 1)
    assert (batch.microbatches_per_optimizer_step, batch.logprob_passes) == (1, 1)
    assert len(plan.guardrails) == 6
    assert all(ok for _, ok in plan.guardrails)


def test_what_is_trained_is_shown_first(load):
    lines = subject(load("policy.megatron_cfg.optimizer.lr=3e-3", "loss_fn.entropy_coef=0.5"))
    assert lines["algorithm"] == "grpo"
    assert lines["tokenizer"] == "char"
    assert "lr: 0.003" in lines["optimizer"]
    assert "entropy_coef: 0.5" in lines["loss_fn"]
    assert "ratio_clip_c" not in lines["loss_fn"]  # as it is by default
    assert shown(preflight(load())).index("lr: ") < shown(preflight(load())).index("Parallel layout")


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        (("checkpointing.keep_top_k=null",), 30),
        (("checkpointing.keep_top_k=3", "checkpointing.metric_name=null"), 3),
        (("checkpointing.keep_top_k=3", "checkpointing.metric_name=train:loss"), 4),
    ],
)
def test_all_checkpoints_that_are_kept_are_counted(load, keys, kept):
    every_ten = ("checkpointing.enabled=true", "checkpointing.save_period=10", "grpo.max_num_steps=300")
    assert f" {kept} kept at most" in checkpoints_on_disk(load(*every_ten, *(f"++{key}" for key in keys)))
    assert "enabled: false" in checkpoints_on_disk(load("checkpointing.enabled=false"))


def test_what_is_trained_names_no_value_from_the_environment(load, monkeypatch):
    monkeypatch.setenv("RUN_TOKEN", "hunter2-hunter2")
    own = ("+loss_fn.type=custom_parts:CountedPG", "+loss_fn.args={key: '${oc.env:RUN_TOKEN}'}")
    assert "hunter2" not in str(subject(load(*own)))
    assert "oc.env:RUN_TOKEN" in subject(load(*own))["loss_fn"]


def test_batch_arithmetic_adds_up(load):
    plan = preflight(
        load(
            TP2,
            "cluster.cpu_workers_per_node=4",
            "policy.train_global_batch_size=64",
            "policy.train_micro_batch_size=8",
            "policy.logprob_batch_size=16",
        )
    )
    batch = plan.batch
    assert batch.optimizer_steps * batch.microbatches_per_optimizer_step * 8 * 2 == batch.samples
    assert batch.logprob_passes * 16 * 2 == batch.samples


@pytest.mark.parametrize("budgets", [(), ("+policy.dynamic_batching.enabled=true",)])
def test_the_last_microbatch_and_the_last_pass_may_hold_fewer_samples(load, budgets):
    batch = preflight(
        load("policy.train_micro_batch_size=96", "policy.logprob_batch_size=48", *budgets)
    ).batch
    assert (batch.microbatches_per_optimizer_step, batch.logprob_passes) == (2, 3)  # of 128 samples a rank


def test_unfused_has_no_guardrails(load):
    plan = preflight(load(UNFUSED))
    assert plan.guardrails == ()
    assert "use_fused_linear_logprobs  off" in shown(plan)


def test_memory_of_the_whole_model_on_one_rank(load):
    memory = estimate_memory(load())["policy"]
    weights = 86_336 * 4
    assert memory.rank_parameters == 86_336
    assert (memory.weights, memory.gradients, memory.reference) == (weights, weights, 0)
    assert memory.optimizer == 2 * weights // 2  # two moments over two ranks
    # All logits fit into one chunk; besides, a byte for each may be kept.
    assert memory.logits == 2 * 128 * 8 * 32 * 4 + 128 * 8 * 32
    assert memory.total == sum(
        (memory.weights, memory.gradients, memory.optimizer, memory.reference, memory.logits)
    )


HYBRID = [
    f"policy.model.{key}"
    for key in (
        *("num_layers=4", "hybrid_layer_pattern=M-M*", "mamba_num_heads=4", "mamba_head_dim=16"),
        *("mamba_num_groups=2", "mamba_state_dim=8", "activation_func=squared_relu"),
    )
]
# What is projected, the convolution, three numbers a head, two norms, and the output.
MAMBA = (2 * 64 + 2 * 2 * 8 + 4) * 64 + 96 * 5 + 3 * 4 + 2 * 64 + 64 * 64
ATTENTION, MLP = 41_088 - 3 * 64 * 128 - 64, 2 * 64 * 128 + 64


BF16, MTP = "policy.precision=bfloat16", "policy.model.mtp_num_layers=1"
EXPERTS = ("policy.model.num_moe_experts=4", "policy.megatron_cfg.expert_model_parallel_size=2")
IN_FP32 = "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32"
PACKED = [
    f"policy.sequence_packing.{key}" for key in ("enabled=true", "train_mb_tokens=64", "logprob_mb_tokens=96")
]
CHUNK = "policy.megatron_cfg.fused_linear_logprobs_chunk_size=16"
EXPERT, LAYER = 3 * 64 * 128, 41_088
PREDICTION = LAYER + 2 * 64**2 + 3 * 64


@pytest.mark.parametrize(
    ("overrides", "field", "expected"),
    [
        ([BF16], "weights", 86_336 * 2),
        ([BF16], "gradients", 86_336 * 4),
        ([BF16, f"{IN_FP32}=false"], "gradients", 86_336 * 2),
        ([BF16], "optimizer", 86_336 * 12 // 2),
        (["policy.megatron_cfg.optimizer.use_distributed_optimizer=false"], "optimizer", 86_336 * 8),
        ([KL], "reference", 86_336 * 4),
        ([CHUNK], "logits", 2 * 16 * 32 * 4 + 128 * 8 * 32),
        ([ONE_ROW], "logits", 2 * 32 * 4 + 128 * 8 * 32),
        ([ONE_ROW, TP2], "logits", 2 * 16 * 4 + 128 * 8 * 16),
        # Only the tokens of training are kept for a backward pass.
        ([ONE_ROW, "policy.logprob_batch_size=256"], "logits", 2 * 32 * 4 + 128 * 8 * 32),
        ([ONE_ROW, "policy.model.vocab_size=2000000"], "logits", 2 * 2_000_000 * 4 + 2**30),
        ([UNFUSED, CHUNK], "logits", 2 * 128 * 8 * 32 * 4),
        ([UNFUSED, *PACKED], "logits", 2 * 96 * 32 * 4),
        ([TP2, UNFUSED], "logits", 2 * 128 * 8 * 16 * 4),
        # Each rank has the five norms whole.
        ([TP2], "rank_parameters", (86_336 - 5 * 64) // 2 + 5 * 64),
        ([PP2], "rank_parameters", LAYER + 2_048 + 64),
        # Two layers: half of four experts each, and the router's four rows instead of one feed-forward layer.
        ([*EXPERTS], "rank_parameters", 86_336 + 2 * (2 - 1) * EXPERT + 2 * 4 * 64),
        # On two ranks nothing else holds the same experts, so that only the other weights' state is shared.
        ([*EXPERTS], "optimizer", 8 * ((86_336 - 2 * EXPERT + 2 * 4 * 64) // 2 + 2 * 2 * EXPERT)),
        ([MTP], "rank_parameters", 86_336 + PREDICTION),
        ([PP2, MTP], "rank_parameters", LAYER + PREDICTION + 2 * 2_048 + 64),
        ([*HYBRID], "rank_parameters", 2 * MAMBA + ATTENTION + MLP + 2 * 2_048 + 64),
        # The norms before each layer, and the last one, are whole.
        ([*HYBRID, TP2], "rank_parameters", (2 * MAMBA + ATTENTION + MLP + 2 * 2_048 - 4 * 64) // 2 + 5 * 64),
        ([*HYBRID, PP2], "rank_parameters", MAMBA + MLP + 2_048 + 64),
    ],
)
def test_memory_follows_the_recipe(load, overrides, field, expected):
    assert getattr(estimate_memory(load(*overrides))["policy"], field) == expected


GPUS = "cluster.gpus_per_node=2"
VLLM = "policy.generation.backend=vllm"


@pytest.mark.parametrize(
    ("overrides", "place", "kept"),
    [
        ((), "in the ranks' memory", True),
        ((GPUS,), "on GPUs with 0.003216 GiB free when the run starts, else in page-locked memory of the CPU", True),
        ((GPUS, VLLM), "in page-locked memory of the CPU, exchanged with the policy's for each pass", False),
        (
            (GPUS, VLLM, "policy.generation.colocated.enabled=false",
             "policy.generation.colocated.resources.gpus_per_node=1"),
            "on GPUs with 0.003216 GiB free when the run starts, else in page-locked memory of the CPU",
            True,
        ),
    ],
)  # fmt: skip
def test_where_the_reference_is_kept(load, packages, overrides, place, kept):
    packages(*ALL)
    plan = preflight(load(KL, *overrides))
    assert f"reference policy        {place}" in shown(plan)
    assert plan.memory["policy"].reference == 86_336 * 4 * kept


def test_missing_tokenizer_folder(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load("policy.tokenizer.name=nowhere")
    assert refused(config) == ["policy.tokenizer.name: not-found"]
    (tmp_path / "nowhere").mkdir()
    assert "policy.tokenizer.name: not-found" in refused(config)[0]
    (tmp_path / "nowhere/tokenizer.model").touch()
    assert preflight(config)


def test_every_missing_thing_is_reported(load, tmp_path, packages):
    (tmp_path / "file").touch()
    packages()
    config = load(
        "policy.tokenizer.name=nowhere",
        "logger.wandb_enabled=true",
        "logger.mlflow_enabled=true",
        f"logger.log_dir={tmp_path}/file/logs",
    )
    texts = refused(config)
    assert [text.partition(":")[0] for text in texts] == [
        "policy.tokenizer.name",
        "logger.log_dir",
        "logger.wandb_enabled",
        "logger.mlflow_enabled",
        "logger.tensorboard_enabled",
    ]
    assert "logger.wandb_enabled: not-installed" in texts[2]


def test_packages_of_other_machines_are_only_noted(load, packages):
    packages("tensorboard")
    wandb = load("logger.wandb_enabled=true")
    plan = preflight(wandb, elsewhere=True)
    assert [problem.path for problem in plan.missing] == ["logger.wandb_enabled"]
    with pytest.raises(ConfigError, match="wandb"):
        preflight(wandb)


def test_transformer_engine_must_be_installed(load, packages):
    overrides = ("cluster.gpus_per_node=2", "policy.megatron_cfg.transformer_impl=transformer_engine")
    packages("tensorboard")
    assert "policy.megatron_cfg.transformer_impl: not-installed" in refused(load(*overrides))[0]
    here, there = (
        preflight(load("cluster.gpus_per_node=2"), elsewhere=elsewhere) for elsewhere in (False, True)
    )
    assert here.transformer_impl == "local"
    assert [problem.path for problem in here.warnings] == ["policy.megatron_cfg.transformer_impl"]
    assert there.transformer_impl == "transformer_engine"
    assert [problem.path for problem in there.missing] == ["policy.megatron_cfg.transformer_impl"]
    assert here.missing == there.warnings == ()
    packages(*ALL)
    assert preflight(load(*overrides)).transformer_impl == "transformer_engine"
    assert preflight(load("cluster.gpus_per_node=2")).transformer_impl == "transformer_engine"
    assert preflight(load()).transformer_impl == "local"


def test_ranks_on_gpus_that_share_sequences_need_transformer_engine(load, packages):
    shared = load("cluster.gpus_per_node=2", CP2, UNFUSED)
    packages("tensorboard")
    assert refused(shared) == ["policy.megatron_cfg.context_parallel_size: not-installed"]
    there = preflight(shared, elsewhere=True)
    assert [problem.path for problem in there.missing] == ["policy.megatron_cfg.context_parallel_size"]
    assert there.warnings == ()
    packages(*ALL)
    assert preflight(shared).transformer_impl == "transformer_engine"


def test_the_first_rows_are_shown(load):
    assert subject(load())["row 1"] == "'127>', answer '127'"
    recipe = load_config("examples/configs/quickstart/dpo_cpu.yaml")
    pairs = subject(recipe, elsewhere=True)  # without math-verify, too
    row = r"'Mia has 4 apples and buys 3 more. How many apples does Mia have now?\nThink step by step, and end ...'"
    assert pairs["row 1"] == rf"{row}, answer '4 + 3 = 7\n#### 7', rejected '4 + 3 = 9\n#### 9'"
    assert "row 3" not in pairs


# Engines and asynchronous rollouts

GENERATION = "policy.generation"
APART = f"{GENERATION}.colocated.enabled=false"
RUN = (APART, "grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")
ON_VLLM = (f"{GENERATION}.backend=vllm", "policy.model.num_attention_heads=2")


ENGINES, OF_AN_ENGINE = f"{GENERATION}.engines", f"{GENERATION}.vllm_cfg.tensor_parallel_size"
OWN_GPUS = f"{GENERATION}.colocated.resources={{gpus_per_node: 4, num_nodes: 3}}"


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        ([], "on the training ranks"),
        ([GPUS], "on the training ranks"),
        ([APART], "1 embedded engine, in processes beside the ranks"),
        ([APART, f"{ENGINES}=3", GPUS], "3 embedded engines, on GPUs beside those of the ranks"),
        ([*ON_VLLM, f"{ENGINES}=2"], "2 vLLM engines, in processes beside the ranks"),
        ([*ON_VLLM, GPUS], "2 vLLM engines, on the ranks' GPUs, taking turns"),
        (
            [*ON_VLLM, APART, GPUS, f"{OF_AN_ENGINE}=2", OWN_GPUS],
            "6 vLLM engines of 2 processes each, on GPUs beside those of the ranks",
        ),
        (
            [*ON_VLLM, GPUS, "cluster.num_nodes=4", f"{OF_AN_ENGINE}=4"],
            "2 vLLM engines of 4 processes on 2 machines each, on the ranks' GPUs, taking turns",
        ),
    ],
)
def test_where_engines_live(load, packages, overrides, where):
    packages(*ALL)
    plan = preflight(load(*overrides))
    assert plan.engines.where == where
    assert f"  generation              {where}\n" in shown(plan)


def test_an_engine_holds_the_whole_model_however_the_ranks_cut_it(load):
    memory = preflight(load(APART, "policy.megatron_cfg.tensor_model_parallel_size=2")).engines.memory
    assert memory.parameters == 86336
    assert (memory.weights, memory.buckets, memory.total) == (86336 * 4, 2 << 26, 86336 * 4 + (2 << 26))


@pytest.mark.parametrize("recipe", ["grpo_copy_cpu", "ppo_cpu", "sft_cpu"])
def test_a_run_that_takes_turns_has_nothing_under_way(exemplar, recipe):
    plan = preflight(load_config(exemplar.with_name(f"{recipe}.yaml")))
    assert plan.asynchronous is None
    assert "Asynchronous rollouts" not in shown(plan)


SAVING = "checkpointing.enabled=true"
OLDER = (SAVING, "checkpointing.save_period=5", "grpo.async_grpo.max_trajectory_age_steps=2")


@pytest.mark.parametrize(
    ("overrides", "field", "expected"),
    [
        ([*OLDER, "grpo.async_grpo.max_inflight_prompts=20"], "kept_groups", 5 * 16),
        # 16 answers of 8 tokens to each prompt, 40 bytes a token.
        ([*OLDER, "grpo.async_grpo.max_inflight_prompts=20"], "driver_bytes", (5 + 3) * 16 * 16 * 8 * 40),
        (["checkpointing.enabled=false"], "kept_groups", 0),
        ([SAVING, "checkpointing.save_period=50", "grpo.max_num_steps=3"], "kept_groups", 3 * 16),
        (
            [SAVING, "checkpointing.save_period=20", "grpo.max_num_steps=240"],
            "disk_bytes",
            240 * 16 * 16 * 8 * 40,
        ),
    ],
)
def test_groups_are_kept_until_the_next_checkpoint_and_have_their_disk(load, overrides, field, expected):
    assert getattr(preflight(load(*RUN, *overrides)).asynchronous, field) == expected
