"""The runs of a rehearsal: recorded, killed and resumed, and packed for another machine."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.config.base import Tree, value_at
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.output import write_line
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


class _Watched:
    """A model as it is, but for the calls that its subclasses watch."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


class Killer(Watch):
    """Kills the last rank of the policy by SIGKILL, once, in the first step that it trains; all ranks are local."""

    summary = False

    def model(self, name: str, model: Policy) -> Policy:
        """Return the policy with its last rank about to die; any other model as it is."""
        return cast("Policy", _Doomed(model)) if name == "policy" else model


class _Doomed(_Watched):
    _killed = False

    def train(self, *rows: Any, eval_mode: bool = False, **sizes: Any) -> dict[str, Any]:
        if not eval_mode:
            self._kill()
        return self._policy.train(*rows, eval_mode=eval_mode, **sizes)

    def train_microbatch(self, *rows: Any, **of_chunk: Any) -> None:
        self._kill()
        self._policy.train_microbatch(*rows, **of_chunk)

    def _kill(self) -> None:
        if not self._killed:
            self._killed = True
            write_line(sys.stdout, "the rehearsal now kills a rank by itself, which is to be replaced:")
            os.kill(self._policy.processes[-1], signal.SIGKILL)


_OF_TOKENS = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
"""Columns [B,S] of a policy gradient. Those of other losses speak of the next token, whose mask is another."""


@dataclass
class TrainCall:
    """One call of `train`, or one split step: the loss, rows of an optimizer step, the chunks, the ranks' results."""

    loss_fn: LossFunction
    gbs: int | None
    mbs: int | None
    chunks: list[BatchedDataDict] = field(default_factory=list[BatchedDataDict])
    result: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def whole(self) -> BatchedDataDict:
        return BatchedDataDict.from_batches(self.chunks) if len(self.chunks) > 1 else self.chunks[0]

    def with_noise(self) -> TrainCall | None:
        """Return the call with 1 added to the numbers of a policy gradient that do not count; None where none are."""
        rows = self.whole
        ignored = (rows["token_mask"] * rows["sample_mask"][:, None]) == 0
        noisy = {key: rows[key] + ignored for key in _OF_TOKENS if key in rows and "advantages" in rows}
        if not noisy or not ignored.any():
            return None
        return replace(self, chunks=[BatchedDataDict(rows, **noisy)])

    def split_calls(self, policy: PolicyConfig, shards: int = 1) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the calls of the split step on the same rows: each method's name and arguments.

        Its chunks are a sample for each data-parallel rank, then all other samples.
        """
        sizes = BatchSizes.of(policy, self.loss_fn, self.gbs, self.mbs)
        for batch in sizes.steps(self.whole):
            samples = batch.samples(sizes.rows_per_sample)
            yield "begin_train_step", {"loss_fn": self.loss_fn, "gbs": self.gbs, "mbs": self.mbs}
            for part in filter(None, (samples[:shards], samples[shards:])):
                yield "train_microbatch", {"data": batch.slice(part[0].start, part[-1].stop)}
            yield "finish_train_step", {}


class Recorder(Watch):
    """Keeps the policy, the engine, and the training calls of policy and critic since `take`."""

    summary = False

    def __init__(self) -> None:
        self.policy: Policy | None = None
        self.answering: GenerationInterface | None = None
        self._calls: dict[str, list[TrainCall]] = {}

    def model(self, name: str, model: Policy) -> Policy:
        """Return a model with its training calls kept."""
        if name == "policy":
            self.policy = model
        return cast("Policy", _Recorded(model, self._calls.setdefault(name, [])))

    def engine(self, engine: GenerationInterface) -> None:
        self.answering = engine

    def take(self, name: str) -> list[TrainCall]:
        """Return the calls of a model since the last time; none where the run has no such model."""
        calls = self._calls.get(name, [])
        taken, calls[:] = [*calls], []
        return taken


class _Recorded(_Watched):
    def __init__(self, policy: Policy, calls: list[TrainCall]) -> None:
        super().__init__(policy)
        self._calls = calls

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        *,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        result = self._policy.train(data, loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs)
        if not eval_mode:
            self._calls.append(TrainCall(loss_fn, gbs, mbs, [data], result))
        return result

    def begin_train_step(self, loss_fn: LossFunction, **sizes: Any) -> None:
        self._policy.begin_train_step(loss_fn, **sizes)
        self._calls.append(TrainCall(loss_fn, sizes.get("gbs"), sizes.get("mbs")))

    def train_microbatch(self, data: BatchedDataDict, **of_chunk: Any) -> None:
        self._policy.train_microbatch(data, **of_chunk)
        self._calls[-1].chunks.append(data)

    def finish_train_step(self) -> dict[str, Any]:
        result = self._policy.finish_train_step()
        self._calls[-1].result = result
        return result


Row = Mapping[str, float]
EXPORTED, KILLED = "hf", "killed"
"""Folders of the weights after the last step, as the ranks wrote them, and of the run after its first save."""
SPLIT = "split"
"""Folder of the checkpoint after the last step, when all ranks train it by the split step."""


@dataclass
class Ran:
    """A recipe that ran in a layout: its metrics, and each step's training calls, also those of PPO's critic.

    digest, version: of the weights that separate engines received last. folder: of all its files.
    """

    tree: Tree
    layout: Sharing
    folder: Path
    rows: list[Row] = field(default_factory=list[Row])
    calls: list[list[TrainCall]] = field(default_factory=list[list[TrainCall]])
    critic_calls: list[list[TrainCall]] = field(default_factory=list[list[TrainCall]])
    digest: str = ""
    version: int | None = None

    @cached_property
    def config(self) -> RunConfig:
        return loaded(self.tree)

    def step(self, number: int, run: str = "run") -> Path:
        return self.folder / run / "checkpoints" / f"step_{number}"

    def on_one_rank(self, **changes: object) -> RunConfig:
        """Return the recipe on one rank; changes: keys of the policy, with __ for the dots."""
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
    """Run all steps; copy the folder after the first, and after the last export the weights and train it split."""
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
            # Of ranks that answer themselves there are none.
            ran.digest = str(getattr(engine, "weights_digest", "") or "")
            ran.version = getattr(engine, "weights_version", None)
            policy.load_checkpoint(str(ran.step(1) / "policy"))
            for call in ran.calls[-1]:
                for method, given in call.split_calls(ran.config.policy, ran.layout.data):
                    getattr(policy, method)(**given)
            policy.save_checkpoint(str(ran.folder / SPLIT / "policy"))
    return f"on {ran.layout.ranks} ranks"


def resumed(ran: Ran, session: RayCluster) -> list[Row]:
    """Resume the copy, kill a rank in the step that is left, and return the metrics of that step."""
    tree = copy.deepcopy(ran.tree)
    put(tree, "logger.log_dir", str(ran.folder / KILLED))
    put(tree, "checkpointing.checkpoint_dir", str(ran.folder / KILLED / "checkpoints"))
    put(tree, "cluster.max_trainer_restarts", 1)
    return [*train(loaded(tree), session=session, watch=Killer())]


_FOLDER, _SHIPPED = "@folder@", "@package@"


def packed(ran: Ran) -> Tree:
    """Return the shrunk recipe on one rank, the rows that were made for it, and the metrics of its steps."""
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
    """Write the recipe of a packed run and its rows into a folder, and return the file of the recipe.

    Raises ValueError for a run with a teacher, whose weights are not in it.
    """
    if value_at(run["recipe"], "teacher") is not None:
        raise ValueError("the weights of its teacher were made for the rehearsal, and are not in its JSON")
    for name, text in run["files"].items():
        (folder / name).write_text(text, encoding="utf-8")
    recipe = folder / "recipe.yaml"
    written = json.dumps(run["recipe"]).replace(_FOLDER, str(folder)).replace(_SHIPPED, str(SHIPPED))
    recipe.write_text(written + "\n", encoding="utf-8")
    return recipe
