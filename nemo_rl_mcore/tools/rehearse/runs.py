"""The runs of a rehearsal: recorded, killed and resumed, and packed for another machine."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.config.base import Tree, value_at
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.output import count_of, write_line
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.rollouts.player import GenerationInterface
from nemo_rl_mcore.driver.run import Watch, train
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.models import missing_family
from nemo_rl_mcore.rank.train_step import BatchSizes
from nemo_rl_mcore.recipe.load import load_recipe
from nemo_rl_mcore.recipe.shipped import SHIPPED
from nemo_rl_mcore.recipe.sources import Recipe
from nemo_rl_mcore.tools.check.given_weights import ONE_RANK
from nemo_rl_mcore.tools.migrate.draft import put
from nemo_rl_mcore.tools.rehearse.shrink import Sharing


class Found(Exception):
    """A difference between numbers that must agree."""


_TRAINING = ("train", "begin_train_step", "train_microbatch", "finish_train_step")


class _Watched:
    """A model whose training calls go to `called`, as (method's name, method, *arguments)."""

    def __init__(self, policy: Policy, called: Callable[..., Any]) -> None:
        self._policy, self._called = policy, called

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._policy, name)
        return partial(self._called, name, found) if name in _TRAINING else found


class Killer(Watch):
    """Kills the policy's last rank with SIGKILL, once, in the first step that it trains; all ranks are local."""

    summary = False

    def model(self, name: str, model: Policy) -> Policy:
        """Return the policy with its last rank about to die; return other models unchanged."""
        killed = False

        def called(method: str, call: Callable[..., Any], *rows: Any, **options: Any) -> Any:
            nonlocal killed
            trains = method in ("train", "train_microbatch") and not options.get("eval_mode")
            if trains and not killed:
                killed = True
                write_line(sys.stdout, "the rehearsal now kills a rank, which the run must replace:")
                *_, last = model.workers.identities.values()
                os.kill(last.pid, signal.SIGKILL)
            return call(*rows, **options)

        return cast("Policy", _Watched(model, called)) if name == "policy" else model


@dataclass
class TrainCall:
    """A call of `train`, or a split step: the loss, its batch in chunks, and the ranks' result."""

    loss_fn: LossFunction
    gbs: int | None
    mbs: int | None
    chunks: list[BatchedDataDict] = field(default_factory=list[BatchedDataDict])
    result: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def whole(self) -> BatchedDataDict:
        return BatchedDataDict.from_batches(self.chunks) if len(self.chunks) > 1 else self.chunks[0]

    def split_calls(self, policy: PolicyConfig, shards: int = 1) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the split step's calls on the same rows: each method's name and arguments.

        The first chunk has one sample per data-parallel rank, the second all other samples.
        """
        sizes = BatchSizes.of(policy, self.loss_fn, self.gbs, self.mbs)
        for batch in sizes.steps(self.whole):
            samples = batch.samples(sizes.rows_per_sample)
            yield "begin_train_step", {"loss_fn": self.loss_fn, "gbs": self.gbs, "mbs": self.mbs}
            for part in filter(None, (samples[:shards], samples[shards:])):
                yield "train_microbatch", {"data": batch.slice(part[0].start, part[-1].stop)}
            yield "finish_train_step", {}


class Recorder(Watch):
    """Keeps the policy, the engine, and the training calls of policy and critic since the last `take`."""

    summary = False

    def __init__(self) -> None:
        self.policy: Policy | None = None
        self.answering: GenerationInterface | None = None
        self._calls: dict[str, list[TrainCall]] = {}

    def model(self, name: str, model: Policy) -> Policy:
        """Return the model with its training calls recorded."""
        calls = self._calls.setdefault(name, [])
        if name == "policy":
            self.policy = model

        def called(method: str, call: Callable[..., Any], *given: Any, **options: Any) -> Any:
            result, sizes = call(*given, **options), (options.get("gbs"), options.get("mbs"))
            match method:
                case "train" if not options.get("eval_mode"):
                    data, loss_fn = given
                    calls.append(TrainCall(loss_fn, *sizes, [data], result))
                case "begin_train_step":
                    calls.append(TrainCall(given[0], *sizes))
                case "train_microbatch":
                    calls[-1].chunks.append(given[0])
                case "finish_train_step":
                    calls[-1].result = result
                case _:
                    pass
            return result

        return cast("Policy", _Watched(model, called))

    def engine(self, engine: GenerationInterface) -> None:
        self.answering = engine

    def take(self, name: str) -> list[TrainCall]:
        """Return a model's calls since the last `take`; none if the run has no such model."""
        calls = self._calls.get(name, [])
        taken, calls[:] = [*calls], []
        return taken


Row = Mapping[str, float]
EXPORTED, KILLED = "hf", "killed"
"""Folders: the exported weights after the last step, and a copy of the run after its first checkpoint."""
SPLIT = "split"
"""Folder of the checkpoint that all ranks write after training the last step again as a split step."""


@dataclass
class Ran:
    """A recipe that ran in a layout: each step's metrics and training calls, including those of PPO's critic.

    folder: holds all its files. digest, version: those of the weights that separate engines received last.
    resumed_rows: metrics of the steps that its copy ran after the kill.
    """

    tree: Tree
    layout: Sharing
    folder: Path
    rows: list[Row] = field(default_factory=list[Row])
    calls: list[list[TrainCall]] = field(default_factory=list[list[TrainCall]])
    critic_calls: list[list[TrainCall]] = field(default_factory=list[list[TrainCall]])
    digest: str = ""
    version: int | None = None
    resumed_rows: list[Row] = field(default_factory=list[Row])

    @cached_property
    def config(self) -> RunConfig:
        return loaded(self.tree)

    def step(self, number: int, run: str = "run") -> Path:
        return self.folder / run / "checkpoints" / f"step_{number}"

    def on_one_rank(self, **changes: object) -> RunConfig:
        """Return the recipe for one rank; changes: keys of the policy, with __ for the dots."""
        tree = copy.deepcopy(self.tree)
        for path, value in ONE_RANK.items():
            put(tree, path, value)
        for name, value in changes.items():
            put(tree, f"policy.{name.replace('__', '.')}", value)
        return loaded(tree)


def loaded(tree: Tree) -> RunConfig:
    """Return the configuration of a recipe; raises ConfigError."""
    return load_recipe(Recipe(OmegaConf.create(copy.deepcopy(tree)), ()))


def run_in(ran: Ran, session: RayCluster) -> str:
    """Run all steps, with a copy of the folder after the first.

    After the last step, export the weights and train that step again as a split step.
    """
    recorder = Recorder()
    for row in train(ran.config, session=session, watch=recorder):
        ran.rows.append(row)
        ran.calls.append(recorder.take("policy"))
        ran.critic_calls.append(recorder.take("value"))
        if len(ran.rows) == 1:
            shutil.copytree(ran.folder / "run", ran.folder / KILLED)
        elif not missing_family(ran.config.policy.model):
            policy, engine = recorder.policy, recorder.answering
            assert policy is not None
            policy.export_hf(str(ran.folder / EXPORTED))
            # Ranks that generate themselves have neither.
            ran.digest = str(getattr(engine, "weights_digest", "") or "")
            ran.version = getattr(engine, "weights_version", None)
            policy.load_checkpoint(str(ran.step(1) / "policy"))
            for call in ran.calls[-1]:
                for method, given in call.split_calls(ran.config.policy, ran.layout.data):
                    getattr(policy, method)(**given)
            policy.save_checkpoint(str(ran.folder / SPLIT / "policy"))
    return f"on {count_of(ran.layout.ranks, 'rank')}"


def resume_copy(ran: Ran, session: RayCluster) -> str:
    """Resume the copy, and kill a rank in its remaining step; raises Found unless the rank was replaced."""
    tree = copy.deepcopy(ran.tree)
    put(tree, "logger.log_dir", str(ran.folder / KILLED))
    put(tree, "checkpointing.checkpoint_dir", str(ran.folder / KILLED / "checkpoints"))
    put(tree, "cluster.max_trainer_restarts", 1)
    ran.resumed_rows = [*train(loaded(tree), session=session, watch=Killer())]
    if ran.resumed_rows[-1].get("recovery/restarts") != 1:
        raise Found("the killed rank was not replaced")
    return "from a copy of the folder after step 1; a rank killed in step 2"


_FOLDER, _SHIPPED = "@folder@", "@package@"


def packed(ran: Ran) -> Tree:
    """Return the shrunk recipe for one rank, its synthetic rows, and its steps' metrics."""
    tree = json.loads(json.dumps(ran.tree, default=str))
    for path, value in ONE_RANK.items():
        put(tree, path, value)
    put(tree, "checkpointing", {"enabled": False})
    text = json.dumps(tree).replace(str(ran.folder), _FOLDER).replace(str(SHIPPED), _SHIPPED)
    return {
        "algorithm": ran.config.algorithm,
        "recipe": json.loads(text),
        "files": {file.name: file.read_text(encoding="utf-8") for file in ran.folder.glob("*.jsonl")},
        "steps": [dict(row) for row in ran.rows],
    }


def unpacked(run: Mapping[str, Any], folder: Path) -> Path:
    """Write a packed run's recipe and rows into a folder, and return the recipe's path.

    Raises ValueError for a run with a teacher: the teacher's weights are not packed.
    """
    if value_at(run["recipe"], "teacher") is not None:
        raise ValueError("the teacher's weights were made for the rehearsal, and are not in its JSON")
    for name, text in run["files"].items():
        (folder / name).write_text(text, encoding="utf-8")
    recipe = folder / "recipe.yaml"
    written = json.dumps(run["recipe"]).replace(_FOLDER, str(folder)).replace(_SHIPPED, str(SHIPPED))
    recipe.write_text(written + "\n", encoding="utf-8")
    return recipe
