"""Megatron's settings here, after `migrate`, compared with those of NeMo RL."""

from dataclasses import MISSING, fields
from enum import Enum

import pytest
import yaml
from doc_pages import PAGES, REPO
from migrations import migrated_with

THEIRS = yaml.safe_load((REPO / "tests/fixtures/megatron_settings_of_nemo_rl.yaml").read_text())
HEADING = "## Megatron's settings compared with NeMo RL's"
SECTION = {
    "transformer": "TransformerConfig",
    "ddp": "DistributedDataParallelConfig",
    "optimizer": "OptimizerConfig",
}

_OPTIMIZER = "optimizer: {lr: 3.0e-07, min_lr: 3.0e-08}, scheduler: {lr_warmup_init: 3.0e-08}"
_LONG = "max_total_sequence_length: 4096, train_micro_batch_size: 1, logprob_batch_size: 4"
RECIPES = {
    "grpo_math_1B_megatron": "",
    "grpo_math_8B_megatron": "policy: {model_name: meta-llama/Llama-3.1-8B-Instruct, "
    f"{_LONG}, megatron_cfg: {{pipeline_model_parallel_size: 2, {_OPTIMIZER}}}}}\ncluster: {{gpus_per_node: 8}}",
    "grpo_math_qwen30ba3b_megatron": f"policy: {{model_name: Qwen/Qwen3-30B-A3B, {_LONG}, sequence_packing: "
    "{enabled: false}, megatron_cfg: {tensor_model_parallel_size: 2, expert_model_parallel_size: 8, "
    f"sequence_parallel: true, {_OPTIMIZER}}}, generation: {{vllm_cfg: {{tensor_parallel_size: 4}}}}}}\n"
    "cluster: {gpus_per_node: 8, num_nodes: 8}",
}


def plain(value):
    """A value as YAML has it."""
    if str(value).startswith("torch."):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple):
        return [*value]
    if isinstance(value, Enum):
        return value.name
    return value.__name__ if callable(value) else value


def filled(kind, settings):
    """All fields of one of Megatron's configurations, before it derives any."""
    assert settings.keys() <= {field.name for field in fields(kind)}
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(kind)
        if field.default is not MISSING or field.default_factory is not MISSING
    }
    return {name: plain(value) for name, value in (defaults | settings).items()}


def settings_on_gpus(policies):
    """Megatron's settings for each policy on GPUs with Transformer Engine's layers."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo_rl_mcore.rank.megatron.model import Kernels, bucket_settings, transformer_settings
    from nemo_rl_mcore.rank.megatron.optimizer_state import optimizer_settings

    kernels = Kernels(gpu=True, engine=True, apex=False)
    return [
        {
            "transformer": filled(TransformerConfig, transformer_settings(policy, kernels)),
            "ddp": filled(DistributedDataParallelConfig, bucket_settings(policy)),
            "optimizer": filled(OptimizerConfig, optimizer_settings(policy)),
        }
        for policy in policies
    ]


@pytest.fixture(scope="module")
def differences(ranks, tmp_path_factory):
    """(configuration, field, NeMo RL's value, ours), over the recipes; fields that both versions of Megatron have."""
    folder = tmp_path_factory.mktemp("theirs")
    runs = [migrated_with(changes, "grpo_math_1B_megatron", folder).config for changes in RECIPES.values()]
    found = set()
    [all_ours] = ranks(1).run(settings_on_gpus, [run.policy for run in runs])
    for name, ours in zip(RECIPES, all_ours, strict=True):
        for part, settings in ours.items():
            theirs = THEIRS[part]["common"] | THEIRS[part].get(name, {})
            for field in theirs.keys() & settings.keys():
                if theirs[field] != settings[field]:
                    found.add((SECTION[part], field, cell(theirs[field]), cell(settings[field])))
    return found


def cell(value):
    return yaml.safe_dump(value, default_flow_style=True).split("\n")[0]


def rows_of(page):
    """(configuration, field, NeMo RL's value, ours, reason) of the page's table."""
    part = page.split(HEADING)[1].split("\n## ")[0]
    rows = (line.strip("| \n").split(" | ") for line in part.splitlines() if line.startswith("| "))
    return [row for row in rows if row[0] in SECTION.values()]


def test_every_difference_is_a_row_with_a_reason(differences):
    rows = rows_of(PAGES["docs/performance.md"])
    assert {tuple(row[:4]) for row in rows} == differences
    assert all(len(row) == 5 and len(row[4]) > 10 for row in rows)


def test_fp8_changes_the_settings_that_it_changes_there_and_no_other(ranks, tmp_path):
    keys = "{enabled: true, fp8: hybrid, fp8_recipe: tensorwise, fp8_param: false}"
    changes = "", f"policy: {{megatron_cfg: {{fp8_cfg: {keys}}}}}"
    runs = [migrated_with(change, "grpo_math_1B_megatron", tmp_path).config for change in changes]
    [(without, found)] = ranks(1).run(settings_on_gpus, [run.policy for run in runs])
    fp8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    assert found == without | {"transformer": without["transformer"] | fp8}
    assert without["transformer"]["fp8"] is None
