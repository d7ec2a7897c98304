"""A policy's checkpoint: weights, reference weights, optimizer, schedule and random state, in one folder.

weights/, reference/, optimizer/   torch_dist, which any parallel layout reads; of adapters, theirs alone
base/                              the weights beside adapters, where no name leads to them
random/rank_R.pt                   the generators of one rank, of use to the same layout only
state.json                         the counters of optimizer and schedule, the layout, the last committed step_ids
SHA256SUMS                         the checksum of every file

All ranks must see the folder.
"""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.agreement import agreed, agreed_on_first
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
from nemo_rl_mcore.rank.rendezvous import patient_group

_WRITER = re.compile(r"(?:__|rank_)(\d+)[_.]")


def write_sums_together(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write the list of a folder that all ranks have filled; OSError on all ranks if one of them cannot."""

    def own_sums() -> dict[str, str]:
        sums: dict[str, str] = {}
        for name in _files(folder):
            match = _WRITER.match(Path(name).name)
            if dist.get_rank() == (int(match[1]) if match is not None else 0):
                sums[name] = sha256(folder / name)
        return sums

    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, agreed(own_sums, group), group)
    together = {name: value for part in of_all for name, value in part.items()}
    agreed_on_first(lambda: write_sums(folder, together), group)


def require_sums_together(folder: Path, part: str = "") -> None:
    """Compare a folder's files, or those whose names start with `part`, with its list; each rank takes an equal share.

    Raises ValueError on all ranks, naming a file that was changed, is missing or was added.
    """

    def compare() -> None:
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

    agreed(compare)


def _files(folder: Path) -> Iterator[str]:
    """Yield every regular file but the list itself; readers refuse links and pipes."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path != folder / SUMS_FILE:
            yield str(path.relative_to(folder))


def generators_file(folder: Path) -> Path:
    return folder / f"rank_{dist.get_rank()}.pt"


def read_generators(folder: Path) -> dict[str, Any]:
    """Return the saved generators; each is tried on one of its own kind, so that restoring cannot fail half-way."""
    path = generators_file(folder)
    try:
        state = torch.load(io.BytesIO(read_regular(path, follow_links=False)), weights_only=True)
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(state["numpy"])
        on_device = torch.Generator(accelerator.device())
        for own, saved in zip((torch.Generator(), on_device), state["device"], strict=False):
            own.set_state(saved)
        if state["tracker"].keys() != rng_tracker().get_states().keys():
            raise ValueError("it has other generators than this layout")
        for saved in state["tracker"].values():
            on_device.set_state(saved)
    except Exception as error:  # of four libraries, for whatever is not a state
        raise ValueError(f"{path} is not the random state of a rank: {error}") from error
    return cast("dict[str, Any]", state)


BASE = "base"
WEIGHTS = "weights"
REFERENCE = "reference"
OPTIMIZER = "optimizer"
RANDOM = "random"
STATE_FILE = "state.json"


class Base(BaseModel):
    """The model beside adapters: the key of its name, none for random weights, and a digest of its bits."""

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
    """The parts that a checkpoint saves and restores; base: None if the whole model is trained."""

    backend: MegatronTrainBackend
    policy: PolicyConfig
    reference: ReferencePolicy | None
    base: Base | None
    verify_checksums: bool

    def parts(self) -> Iterator[tuple[str, ShardedStateDict]]:
        """Yield the sharded state of each folder; its tensors are the model's own until the next one is yielded."""
        chunks, base = self.backend.chunks, self.base
        if base is not None and base.model_name is None and base.init_checkpoint is None:
            yield BASE, _model_state(chunks)
        yield WEIGHTS, self._trained_state()
        if self.reference is not None:
            with self.reference.swapped_in():
                yield REFERENCE, _model_state(chunks)
        yield OPTIMIZER, self.optimizer_state(loading=False)

    def optimizer_state(self, *, loading: bool) -> ShardedStateDict:
        weights = self._trained_state(one_tensor_for_all_layers=not self.policy.megatron_cfg.freeze)
        return sharded_optimizer_state(self.backend.optimizer, weights, loading=loading)

    def _trained_state(self, *, one_tensor_for_all_layers: bool = True) -> ShardedStateDict:
        if self.base is not None:
            return adapter_state(self.backend.chunks, self.policy)
        return _model_state(self.backend.chunks, one_tensor_for_all_layers=one_tensor_for_all_layers)

    def rest(self, committed_step_ids: Sequence[str]) -> Callable[[Path, dist.ProcessGroup | None], None]:
        """Copy the small parts, and return a function that writes them and the checksums of the whole folder."""
        text = _State(
            optimizer_step=optimizer_step(self.backend.optimizer),
            schedule_samples=int(self.backend.scheduler.num_steps),
            layout=_layout(self.policy.megatron_cfg),
            committed_step_ids=[*committed_step_ids],
            base=self.base,
        ).model_dump_json()

        def present_generators() -> bytes:
            # In types that torch loads with weights_only.
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
            agreed(lambda: generators_file(folder / RANDOM).write_bytes(generators), group)
            agreed_on_first(lambda: (folder / STATE_FILE).write_text(text, encoding="utf-8"), group)
            write_sums_together(folder, group)

        return write

    def read_state(self, folder: Path, parts: Sequence[str] = ("",)) -> _State:
        """Return a folder's counters, after comparing the files of these parts with their checksums."""
        saved = agreed(lambda: _read_state(folder))
        for part in parts if self.verify_checksums else ():
            require_sums_together(folder, part)
        return saved


def save_policy(saved: SavedModel, folder: Path, committed_step_ids: Sequence[str] = ()) -> None:
    """Write everything that the next step depends on; every rank takes part, and returns when all have written.

    Raises ValueError on all ranks, with nothing written, if the folder is not empty; OSError if a rank cannot write.
    """
    _require_empty(folder)
    group = patient_group()  # one rank may write for long
    for name, state in saved.parts():
        PreparedState.of(state, copied=False).write(folder / name, group)
    saved.rest(committed_step_ids)(folder, group)


def copy_policy(
    saved: SavedModel, folder: Path, committed_step_ids: Sequence[str] = ()
) -> Callable[[dist.ProcessGroup], None]:
    """Copy what `save_policy` writes into CPU memory; returns a function that writes the copy. Every rank takes part.

    Call it once on every rank, with a group that no other thread uses; the policy may be trained meanwhile.
    """
    _require_empty(folder)
    parts = {name: PreparedState.of(state, copied=True) for name, state in saved.parts()}
    write_rest, device = saved.rest(committed_step_ids), accelerator.device()

    def write(group: dist.ProcessGroup) -> None:
        accelerator.compute_on(device)  # in this thread too
        for name in [*parts]:
            parts.pop(name).write(folder / name, group)  # frees each part once it is written
        write_rest(folder, group)

    return write


def load_policy(model: SavedModel, folder: Path) -> Sequence[str]:
    """Restore everything that `save_policy` wrote, and return the committed step_ids; every rank takes part.

    Generators are restored only into the layout that was saved; a checkpoint without a reference policy leaves the
    given one. Raises ValueError on all ranks, naming the file, if one is broken, and RefusedError for adapters beside
    another model.
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
    state = load_sharded(model.optimizer_state(loading=True), folder / OPTIMIZER)
    load_optimizer_state(backend.optimizer, state, saved.optimizer_step, folder / OPTIMIZER)
    backend.scheduler.num_steps = saved.schedule_samples
    backend.scheduler.step(0)  # sets the rates of that place in the schedule
    if generators is not None:
        random.setstate(generators["python"])
        np.random.set_state(generators["numpy"])
        accelerator.restore_device_rng_states(generators["device"])
        rng_tracker().set_states(generators["tracker"])
    return saved.committed_step_ids


def _load_adapters(model: SavedModel, folder: Path, base: Base) -> None:
    """Fill this rank's adapters; RefusedError on all ranks unless the model beside them is theirs, bit for bit."""
    chunks, found = model.backend.chunks, base_digest(model.backend.chunks, model.policy)
    if found != base.digest:
        named = base.model_name or base.init_checkpoint
        origin = "random weights" if named is None else repr(named)
        raise RefusedError(
            f"{folder} holds adapters beside {origin} with the digest {base.digest}, and this model has {found}: "
            "its weights are others",
            code="other-model",
        )
    _fill(chunks, adapter_state(chunks, model.policy), folder / WEIGHTS)


def base_digest(chunks: Sequence[torch.nn.Module], policy: PolicyConfig) -> str:
    """Return one digest of the weights beside adapters, the same on every layout; every rank takes part."""
    return digests.of_all(digests.digests(full_tensors(chunks, policy, merged=False)))


def load_weights_of(model: SavedModel, folder: Path, *, of_a_policy: bool = False) -> Base | None:
    """Load a folder's weights, whole or adapters with the model beside them, which is returned."""
    chunks, policy = model.backend.chunks, model.policy
    has_base = (folder / BASE).is_dir()
    base = model.read_state(folder, [f"{WEIGHTS}/", *([f"{BASE}/"] if has_base else [])]).base
    if base is None:
        load_weights(chunks, folder / WEIGHTS, of_a_policy=of_a_policy)
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


def load_weights(chunks: Sequence[torch.nn.Module], folder: Path, *, of_a_policy: bool = False) -> None:
    """Fill this rank's weights and buffers; of_a_policy: into a critic, whose value head stays as it is."""
    state = _model_state(chunks)
    for part in state.values() if of_a_policy else ():
        for name in [name for name in part if name.startswith(VALUE_HEAD)]:
            del part[name]
    _fill(chunks, state, folder)


def _fill(chunks: Sequence[torch.nn.Module], state: ShardedStateDict, folder: Path) -> None:
    loaded = load_sharded(state, folder)
    for number, chunk in enumerate(chunks):
        # Not strict: the state leaves out Transformer Engine's objects for FP8 too, see `_model_state`.
        cast(MegatronModule, unwrap_model(chunk)).load_state_dict(loaded[str(number)], strict=False)


def _model_state(
    chunks: Sequence[torch.nn.Module], *, one_tensor_for_all_layers: bool = True
) -> ShardedStateDict:
    """Return the model's weights and buffers, without adapters, by chunk and name.

    one_tensor_for_all_layers: false if some layers have no optimizer state for a weight that others have.
    """
    state: ShardedStateDict = {}
    gather_parameters(chunks)
    for number, chunk in enumerate(chunks):
        metadata = layout_independent() | {"non_homogeneous_layers": not one_tensor_for_all_layers}
        whole = cast(MegatronModule, unwrap_model(chunk)).sharded_state_dict(metadata=metadata)
        # Transformer Engine keeps the scales of FP8 as pickled objects; there is no FP8 here.
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
    def look() -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RefusedError(
                f"{folder} is there and not an empty folder; a checkpoint is written into a new one",
                code="folder-not-empty",
            )

    agreed_on_first(look)


def _read_state(folder: Path) -> _State:
    path = folder / STATE_FILE
    try:
        return _State.model_validate(read_json(path, follow_links=False))
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in details["loc"])
        raise ValueError(f"{path} is not the state of a policy: {place}: {details['msg']}") from error
    except FileNotFoundError as error:
        raise RefusedError(
            f"{folder} is not a checkpoint of a policy: {path} does not exist", code="no-checkpoint"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not the state of a policy: {error}") from error


def layout_independent() -> dict[str, Any]:
    """Return a new `metadata`, in which Megatron notes process groups, for state dicts that any layout can read."""
    return {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False}
