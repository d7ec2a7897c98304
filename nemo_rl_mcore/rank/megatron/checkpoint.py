"""A policy's checkpoint: weights, reference weights, optimizer, schedule and random state, in one folder.

weights/, reference/, optimizer/   in torch_dist, which any parallel layout reads; only the adapters', if there are any
base/                              the base weights of adapters, if no model or checkpoint provides them
random/rank_R.pt                   one rank's generators, restored into the same layout only
state.json                         counters of optimizer and schedule, the layout, the last committed step_ids
SHA256SUMS                         every file's checksum

All ranks must see the folder.
"""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_rl_mcore.config import MegatronConfig, PolicyConfig
from nemo_rl_mcore.data.strict_json import read_json, read_regular
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import accelerator, rendezvous
from nemo_rl_mcore.rank.agreement import agreed, agreed_on_first, together
from nemo_rl_mcore.rank.checkpoints import (
    POLICY_FOLDER,
    SUMS_FILE,
    read_sums,
    require_sums,
    sha256,
    write_sums,
)
from nemo_rl_mcore.rank.megatron.hf_weights.export import full_tensors
from nemo_rl_mcore.rank.megatron.hf_weights.load import OF_ADAPTERS, load_pretrained
from nemo_rl_mcore.rank.megatron.lora import adapter_state
from nemo_rl_mcore.rank.megatron.model_class import VALUE_HEAD
from nemo_rl_mcore.rank.megatron.optimizer_state import (
    gather_parameters,
    load_optimizer_state,
    optimizer_step,
    sharded_optimizer_state,
)
from nemo_rl_mcore.rank.megatron.parallel_groups import rng_tracker
from nemo_rl_mcore.rank.megatron.reference_policy import ReferencePolicy
from nemo_rl_mcore.rank.megatron.sharded_folder import PreparedState, load_sharded
from nemo_rl_mcore.rank.megatron.train_backend import MegatronTrainBackend
from nemo_rl_mcore.rank.refit import digests

_WRITER = re.compile(r"(?:__|rank_)(\d+)[_.]")


def write_sums_together(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write the checksums of a folder that all ranks have filled; OSError on all ranks if one of them fails."""
    own: dict[str, str] = {}
    of_all: list[Any] = [None] * dist.get_world_size()
    with together(group=group):
        for name in _files(folder):
            match = _WRITER.match(Path(name).name)
            if dist.get_rank() == (int(match[1]) if match is not None else 0):
                own[name] = sha256(folder / name)
    dist.all_gather_object(of_all, own, group)
    sums = {name: value for part in of_all for name, value in part.items()}
    agreed_on_first(lambda: write_sums(folder, sums), group)


def require_sums_together(folder: Path, part: str = "") -> None:
    """Verify the checksums of a folder's files, or of those whose names start with `part`, shared among the ranks.

    Raises ValueError on all ranks, naming a file that was changed, is missing or was added.
    """
    with together():
        sums = read_sums(folder)
        if sums is None:
            raise RefusedError(f"{folder / SUMS_FILE} is missing", code="missing-checksums")
        listed = {name for name in sums if name.startswith(part)}
        there = {name: (folder / name).lstat().st_size for name in _files(folder) if name.startswith(part)}
        if gone := sorted(listed - there.keys()):
            raise RefusedError(
                f"{folder / gone[0]} is missing: {folder / SUMS_FILE} lists it", code="missing-file"
            )
        largest_first = sorted(there, key=lambda name: (-there[name], name))
        require_sums(folder, sums, largest_first[dist.get_rank() :: dist.get_world_size()])


def _files(folder: Path) -> Iterator[str]:
    """Yield every regular file except the list itself; readers refuse links and pipes."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path != folder / SUMS_FILE:
            yield str(path.relative_to(folder))


_GENERATORS = "rank_{}.pt"


def read_generators(folder: Path) -> dict[str, Any]:
    """Return the saved generators, each tested on a generator of its kind, so that restoring cannot fail half-way."""
    path = folder / _GENERATORS.format(dist.get_rank())
    try:
        state = torch.load(io.BytesIO(read_regular(path, follow_links=False)), weights_only=True)
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(state["numpy"])
        on_device = torch.Generator(accelerator.device())
        for own, saved in zip((torch.Generator(), on_device), state["device"], strict=False):
            own.set_state(saved)
        if state["tracker"].keys() != rng_tracker().get_states().keys():
            raise ValueError("its generators are not this layout's")
        for saved in state["tracker"].values():
            on_device.set_state(saved)
    except Exception as error:  # four libraries raise different ones for a value that is no state
        raise ValueError(f"{path} is not a rank's random state: {error}") from error
    return cast("dict[str, Any]", state)


LAYOUT_INDEPENDENT = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False}
"""Megatron's `metadata` for state dicts that any layout can read."""
BASE, WEIGHTS, REFERENCE, OPTIMIZER, RANDOM = "base", "weights", "reference", "optimizer", "random"
STATE_FILE = "state.json"


class Base(BaseModel):
    """The base model of adapters: its origin (None for random weights) and a digest of its bits."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model_name: str | None = None
    init_checkpoint: str | None = None
    digest: str = ""


class _State(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    optimizer_step: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    schedule_samples: Annotated[int, Field(ge=0)]
    layout: dict[str, int | None]
    committed_step_ids: list[str]
    has_checksums: Literal[True] = True
    base: Base | None = None


@dataclass(frozen=True)
class SavedModel:
    """The objects that a checkpoint saves and restores; base: None if the whole model is trained."""

    backend: MegatronTrainBackend
    policy: PolicyConfig
    reference: ReferencePolicy | None
    base: Base | None
    verify_checksums: bool

    def parts(self) -> Iterator[tuple[str, ShardedStateDict]]:
        """Yield each folder's sharded state; its tensors are the model's own, valid until the next one is yielded."""
        chunks, base = self.backend.chunks, self.base
        if base is not None and base.model_name is None and base.init_checkpoint is None:
            yield BASE, _model_state(chunks)
        yield WEIGHTS, self.trained_state()
        if self.reference is not None:
            with self.reference.swapped_in():
                yield REFERENCE, _model_state(chunks)
        weights = self.trained_state(by_layer=bool(self.policy.megatron_cfg.freeze))
        yield OPTIMIZER, sharded_optimizer_state(self.backend.optimizer, weights, loading=False)

    def trained_state(self, *, by_layer: bool = False) -> ShardedStateDict:
        if self.base is not None:
            return adapter_state(self.backend.chunks, self.policy)
        return _model_state(self.backend.chunks, by_layer=by_layer)

    def rest(self, committed_step_ids: Sequence[str]) -> Callable[[Path, dist.ProcessGroup | None], None]:
        """Copy the small parts, and return a function that writes them, and then the whole folder's checksums."""
        text = _State(
            optimizer_step=optimizer_step(self.backend.optimizer),
            schedule_samples=int(self.backend.scheduler.num_steps),
            layout=_layout(self.policy.megatron_cfg),
            committed_step_ids=[*committed_step_ids],
            base=self.base,
        ).model_dump_json()

        def present_generators() -> bytes:
            # Only types that torch loads with weights_only.
            name, keys, position, has_gauss, cached = cast("tuple[Any, ...]", np.random.get_state())
            state = {
                "python": random.getstate(),
                "numpy": (name, keys.tolist(), position, has_gauss, cached),
                "device": accelerator.device_rng_states(),
                "tracker": rng_tracker().get_states(),
            }
            torch.save(state, file := io.BytesIO())
            return file.getvalue()

        generators = agreed(present_generators)

        def write(folder: Path, group: dist.ProcessGroup | None) -> None:
            agreed_on_first((folder / RANDOM).mkdir, group)
            file = folder / RANDOM / _GENERATORS.format(dist.get_rank())
            agreed(lambda: file.write_bytes(generators), group)
            agreed_on_first(lambda: (folder / STATE_FILE).write_text(text, encoding="utf-8"), group)
            write_sums_together(folder, group)

        return write

    def read_state(self, folder: Path, parts: Sequence[str] = ("",)) -> _State:
        """Return a folder's state.json, and verify these parts' checksums."""

        def read() -> _State:
            path = folder / STATE_FILE
            try:
                return _State.model_validate(read_json(path, follow_links=False))
            except ValidationError as error:
                details = error.errors(include_url=False, include_input=False)[0]
                place = ".".join(str(part) for part in details["loc"])
                raise ValueError(f"{path} is not a policy's state: {place}: {details['msg']}") from error
            except FileNotFoundError as error:
                raise RefusedError(
                    f"{folder} is not a checkpoint of a policy: {path} does not exist", code="no-checkpoint"
                ) from error
            except (OSError, ValueError) as error:
                raise ValueError(f"{path} is not a policy's state: {error}") from error

        saved = agreed(read)
        for part in parts if self.verify_checksums else ():
            require_sums_together(folder, part)
        return saved


def save_policy(saved: SavedModel, folder: Path, committed_step_ids: Sequence[str] = ()) -> None:
    """Write everything that the next step depends on; every rank takes part, and returns when all have written.

    Raises ValueError on all ranks, with nothing written, if the folder is not empty; OSError if a rank cannot write.
    """
    agreed_on_first(partial(_require_empty, folder))
    group = rendezvous.patient_group  # one rank may write for long
    for name, state in saved.parts():
        PreparedState.of(state, copied=False).write(folder / name, group)
    saved.rest(committed_step_ids)(folder, group)


def copy_policy(
    saved: SavedModel, folder: Path, committed_step_ids: Sequence[str] = ()
) -> Callable[[dist.ProcessGroup], None]:
    """Copy everything that `save_policy` writes into CPU memory, and return a function that writes the copy.

    Every rank takes part, and calls the function once, with a group that no other thread uses. The policy may be
    trained meanwhile.
    """
    agreed_on_first(partial(_require_empty, folder))
    parts = {name: PreparedState.of(state, copied=True) for name, state in saved.parts()}
    write_rest, device = saved.rest(committed_step_ids), accelerator.device()

    def write(group: dist.ProcessGroup) -> None:
        torch.get_device_module(device).set_device(device)  # a new thread starts on the first GPU
        for name in [*parts]:
            parts.pop(name).write(folder / name, group)  # frees each part once it is written
        write_rest(folder, group)

    return write


def load_policy(model: SavedModel, folder: Path) -> Sequence[str]:
    """Restore everything that `save_policy` wrote, and return the committed step_ids; every rank takes part.

    Generators are restored only into the layout that was saved. If the checkpoint has no reference policy, the model's
    is kept. Raises ValueError on all ranks, naming the file, if one is broken, and RefusedError for adapters of another
    model.
    """
    backend, reference, saved = model.backend, model.reference, model.read_state(folder)
    same_layout = saved.layout == _layout(model.policy.megatron_cfg)
    generators = agreed(lambda: read_generators(folder / RANDOM) if same_layout else None)
    if reference is not None and (folder / REFERENCE).is_dir():
        load_weights(backend.chunks, folder / REFERENCE)
        reference.keep()
    if (saved.base is None) != (model.base is None):
        have, has = ("", "no ") if model.base is None else ("no ", "")
        raise RefusedError(
            f"{folder} holds {have}adapters, and the model has {has}of them: see policy.megatron_cfg.peft.enabled",
            code="other-model",
        )
    if saved.base is None:
        load_weights(backend.chunks, folder / WEIGHTS)
    else:
        if (folder / BASE).is_dir():
            load_weights(backend.chunks, folder / BASE)
        _load_adapters(model, folder, saved.base)
    weights = model.trained_state(by_layer=bool(model.policy.megatron_cfg.freeze))
    state = sharded_optimizer_state(backend.optimizer, weights, loading=True)
    state = load_sharded(state, folder / OPTIMIZER)
    load_optimizer_state(backend.optimizer, state, saved.optimizer_step, folder / OPTIMIZER)
    backend.scheduler.num_steps = saved.schedule_samples
    backend.scheduler.step(0)  # sets the rates for this place in the schedule
    if generators is not None:
        random.setstate(generators["python"])
        np.random.set_state(generators["numpy"])
        accelerator.restore_device_rng_states(generators["device"])
        rng_tracker().set_states(generators["tracker"])
    return saved.committed_step_ids


def _load_adapters(model: SavedModel, folder: Path, base: Base) -> None:
    """Load this rank's adapters; RefusedError on all ranks unless their base model is the same, bit for bit."""
    chunks, found = model.backend.chunks, base_digest(model.backend.chunks, model.policy)
    if found != base.digest:
        named = base.model_name or base.init_checkpoint
        origin = "random weights" if named is None else repr(named)
        raise RefusedError(
            f"{folder} holds adapters beside {origin} with the digest {base.digest}, and this model has {found}: "
            "its weights differ",
            code="other-model",
        )
    load_weights(chunks, folder / WEIGHTS, adapter_state(chunks, model.policy))


def base_digest(chunks: Sequence[torch.nn.Module], policy: PolicyConfig) -> str:
    """Return a digest of the base weights of adapters, the same on every layout; every rank takes part."""
    return digests.of_all(digests.digests(full_tensors(chunks, policy, merged=False)))


def load_weights_of(model: SavedModel, folder: Path, *, of_a_policy: bool = False) -> Base | None:
    """Load a folder's weights; if they are adapters, also load and return their base model."""
    chunks, policy = model.backend.chunks, model.policy
    has_base = (folder / BASE).is_dir()
    base = model.read_state(folder, [f"{WEIGHTS}/", *([f"{BASE}/"] if has_base else [])]).base
    if base is None:
        state = _model_state(chunks)
        for part in state.values() if of_a_policy else ():  # a critic keeps its value head
            for name in [name for name in part if name.startswith(VALUE_HEAD)]:
                del part[name]
        load_weights(chunks, folder / WEIGHTS, state)
        return None
    if not policy.megatron_cfg.peft.enabled:
        raise RefusedError(
            f"{folder} holds adapters, and the model has none: set policy.megatron_cfg.peft as it was, or export "
            "the checkpoint and name that folder",
            code="other-model",
        )
    if base.model_name is not None:
        if policy.model_name is None:  # otherwise it is loaded already
            load_pretrained(policy.model_copy(update={"model_name": base.model_name}), chunks)
    elif base.init_checkpoint is not None:
        load_weights_of(model, Path(base.init_checkpoint) / POLICY_FOLDER)
    else:
        load_weights(chunks, folder / BASE)
        base = Base(init_checkpoint=str(folder.parent), digest=base.digest)
    _load_adapters(model, folder, base)
    return base


def load_weights(
    chunks: Sequence[torch.nn.Module], folder: Path, state: ShardedStateDict | None = None
) -> None:
    """Load this rank's weights and buffers; state: only these."""
    loaded = load_sharded(_model_state(chunks) if state is None else state, folder)
    for number, chunk in enumerate(chunks):
        # Not strict, because the state also lacks Transformer Engine's objects for FP8, see `_model_state`.
        cast(MegatronModule, unwrap_model(chunk)).load_state_dict(loaded[str(number)], strict=False)


def _model_state(chunks: Sequence[torch.nn.Module], *, by_layer: bool = False) -> ShardedStateDict:
    """Return the model's weights and buffers, without adapters, by chunk and name.

    by_layer: store a weight as one tensor per layer, not one for all layers, since not all of them may be trained.
    """
    state: ShardedStateDict = {}
    gather_parameters(chunks)
    for number, chunk in enumerate(chunks):
        # A new dictionary for each chunk, since Megatron adds its process groups.
        metadata = LAYOUT_INDEPENDENT | {"non_homogeneous_layers": by_layer}
        whole = cast(MegatronModule, unwrap_model(chunk)).sharded_state_dict(metadata=metadata)
        # Transformer Engine keeps the scales of FP8 as pickled objects; no recipe here needs those of earlier steps.
        _, tensors = extract_matching_values(whole, lambda entry: isinstance(entry, ShardedObject))
        named = cast("dict[str, Any]", tensors)
        state[str(number)] = {name: part for name, part in named.items() if not OF_ADAPTERS.fullmatch(name)}
    return state


def _layout(config: MegatronConfig) -> dict[str, int | None]:
    return {
        "ranks": dist.get_world_size(),
        "tensor": config.tensor_model_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
        "virtual_pipeline": config.virtual_pipeline_model_parallel_size,
        "context": config.context_parallel_size,
        "expert": config.expert_model_parallel_size,
        "expert_tensor": config.expert_tensor_parallel_size,
    }


def _require_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RefusedError(
            f"{folder} exists and is not an empty folder; save the checkpoint to a new one",
            code="folder-not-empty",
        )
