"""Which layouts on a few ranks stand for that of a recipe: what it shares among ranks is shared, among two each."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_mcore.config.base import Tree
from nemo_rl_mcore.config.run_config import RunConfig

_SHARED = ("tensor", "pipeline", "context")
"""What multiplies the ranks of a copy of the model, in the order in which places are given."""
RANKS = (4, 8)
"""Numbers of ranks that a rehearsal may have."""


@dataclass(frozen=True)
class Sharing:
    """Ranks, and how many of them share what; 1 where nobody does. virtual: chunks of a pipeline stage, or None."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    sequence: bool = False
    virtual: int | None = None

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.data * self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        sizes = {"DP": self.data, "TP": self.tensor, "PP": self.pipeline, "VPP": self.virtual or 1}
        sizes |= {"CP": self.context, "EP": self.expert}
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1] + ["SP"] * self.sequence
        return " ".join(words) or "one rank"

    @property
    def keys(self) -> dict[str, object]:
        """Return the keys of policy.megatron_cfg that make it."""
        return {
            "tensor_model_parallel_size": self.tensor,
            "sequence_parallel": self.sequence,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.virtual,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "expert_tensor_parallel_size": 1,
        }


def layouts_of(config: RunConfig, ranks: int) -> list[Sharing]:
    """Return as few layouts of so many ranks as in which everything that the recipe shares is shared by two.

    Copies of the model, where the recipe has several, take the places that are left.
    """
    megatron = config.policy.megatron_cfg
    sizes = {name: getattr(megatron, f"{name}_model_parallel_size", 1) for name in _SHARED}
    sizes["context"] = megatron.context_parallel_size
    left = [name for name in _SHARED if sizes[name] > 1]
    experts = megatron.expert_model_parallel_size > 1
    found: list[Sharing] = []
    while left or experts or not found:
        fits = left[: ranks.bit_length() - 1]
        if experts and not left and fits == []:  # nothing but experts: copies of the rest share them
            found.append(_layout(config, [], 2, expert=2))
            break
        left = left[len(fits) :]
        room = ranks // 2 ** len(fits)
        several = config.data_parallel_size > 1 or (experts and fits == ["pipeline"])
        data = 2 if room > 1 and several else 1
        in_a_stage = data * 2 ** len([name for name in fits if name != "pipeline"])
        here = experts and in_a_stage > 1
        experts = experts and not here
        found.append(_layout(config, fits, data, expert=2 if here else 1))
    return found


def _layout(config: RunConfig, shared: list[str], data: int, expert: int) -> Sharing:
    megatron = config.policy.megatron_cfg
    pipeline = "pipeline" in shared
    return Sharing(
        data=data,
        **dict.fromkeys(shared, 2),
        expert=expert,
        sequence=megatron.sequence_parallel and "tensor" in shared,
        virtual=2 if pipeline and (megatron.virtual_pipeline_model_parallel_size or 1) > 1 else None,
    )


def apart(layouts: list[Sharing]) -> str:
    """Say that what a recipe shares at once is rehearsed one after the other; empty where it is not."""
    return "" if len(layouts) == 1 else f"in {len(layouts)} layouts: " + ", ".join(map(str, layouts))


def stage_keys(config: RunConfig, layout: Sharing) -> Tree:
    """Return the layers of first and last pipeline stages of their own; the first has one, the last two."""
    own = config.policy.megatron_cfg.own_stages
    if layout.pipeline == 1:
        own = {}
    first, last = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    ends = {} if layout.pipeline > 1 else dict.fromkeys(config.policy.megatron_cfg.counted_ends, False)
    return {first: 1 if first in own else None, last: 2 if last in own else None, **ends}


def layers_of(config: RunConfig, layouts: list[Sharing]) -> int:
    """Return the fewest layers, two at least, that every one of the layouts divides; of a hybrid one of each kind."""
    if config.policy.megatron_cfg.own_stages:
        return 3
    chunks = max(layout.pipeline * (layout.virtual or 1) for layout in layouts)
    ends = len(config.policy.megatron_cfg.counted_ends)
    fewest = max(2, len({*(config.policy.model.hybrid_layer_pattern or "")}))
    places = max(fewest + ends, 2 * chunks if ends else chunks)
    return -(-places // chunks) * chunks - ends
