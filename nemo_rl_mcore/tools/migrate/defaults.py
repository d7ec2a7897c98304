"""NeMo RL's defaults of keys that a recipe leaves out, where they are not this package's.

Taken of the classes in nemo_rl/algorithms: grpo.py, ppo.py, dpo.py, sft.py, distillation.py, loss/loss_functions.py and
single_controller_utils/config.py at the commit of nemo_rl_keys.txt.
"""

from collections.abc import Mapping

from pydantic_core import PydanticUndefined

from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.recipe.schema import field_at
from nemo_rl_mcore.tools.migrate.draft import Draft

_OF_ROLLOUTS: Mapping[str, object] = {"num_prompts_per_step": 32, "num_generations_per_prompt": 16}
_OF_LOOPS: Mapping[str, Mapping[str, object]] = {
    "grpo": {
        **_OF_ROLLOUTS,
        **{"max_num_steps": 1_000_000, "max_num_epochs": 1},
        **{"val_period": 10, "val_at_start": False, "max_val_samples": 256, "val_batch_size": 256},
    },
    "ppo": {
        **_OF_ROLLOUTS,
        **{"max_num_steps": 100_000, "max_num_epochs": 100_000, "ppo_epochs": 4},
        **{"val_period": 20, "val_at_start": True, "max_val_samples": 256, "val_batch_size": 256},
    },
    "dpo": {
        **{"max_num_steps": 150, "max_num_epochs": 1},
        **{"val_period": 25, "val_at_start": True, "val_batches": 8},
        **{"val_global_batch_size": 8, "val_micro_batch_size": 1},
    },
    "sft": {
        **{"max_num_steps": 60, "max_num_epochs": 1},
        **{"val_period": 10, "val_at_start": True, "val_batches": 8},
        **{"val_global_batch_size": 32, "val_micro_batch_size": 1},
    },
    "distillation": {
        **{"num_prompts_per_step": 128, "num_generations_per_prompt": 1, "topk_logits_k": 64},
        **{"max_num_steps": 1000, "max_num_epochs": 10},
        **{"val_period": 20, "val_at_start": False, "max_val_samples": 512, "val_batch_size": 64},
    },
}
_OF_LOSSES: Mapping[str, Mapping[str, object]] = {
    "distillation": {"kl_type": "mixed", "mixed_kl_weight": 0.5},
}
_OF_ASYNC_RL: Mapping[str, object] = {"min_groups_for_streaming_train": 32, "max_inflight_prompts": 32}
_WHY = "NeMo RL's default, where a recipe leaves it out"


def write_defaults(draft: Draft) -> None:
    """Write what NeMo RL takes where the recipe says nothing, and this package would take something else."""
    loop = draft.algorithm
    given = {f"{loop}.{key}": value for key, value in _OF_LOOPS[loop].items()}
    if draft.has("loss_fn"):
        given |= {f"loss_fn.{key}": value for key, value in _OF_LOSSES.get(loop, {}).items()}
    for path, value in given.items():
        if not draft.has(path) and value != _ours(path, loop):
            draft.change(path, value, _WHY)
    if loop == "grpo" and draft.section("async_rl"):
        for key, value in _OF_ASYNC_RL.items():
            if not draft.has(f"async_rl.{key}"):
                _write_async_default(draft, key, value)


def _write_async_default(draft: Draft, key: str, value: object) -> None:
    """There a step is no more than its groups, so that a larger number is all of them, which is our default."""
    groups = draft.number("grpo.num_prompts_per_step")
    if key == "min_groups_for_streaming_train" and groups is not None and groups <= 32:
        return
    draft.change(f"async_rl.{key}", value, _WHY)


def _ours(path: str, loop: str) -> object:
    field = field_at(path, RUN_CONFIGS[loop])
    return PydanticUndefined if field is None else field.default
