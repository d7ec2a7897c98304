"""The runs of a rehearsal: two steps with a save after each, and one that resumes from a copy of the first save."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import OmegaConf

from nemo_rl_mcore.config.base import Tree
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.run import train
from nemo_rl_mcore.models import missing_family
from nemo_rl_mcore.recipe.load import load_recipe
from nemo_rl_mcore.recipe.sources import Recipe
from nemo_rl_mcore.tools.check.given_weights import ONE_RANK
from nemo_rl_mcore.tools.rehearse.killed import Killer
from nemo_rl_mcore.tools.rehearse.layouts import Layout
from nemo_rl_mcore.tools.rehearse.recorded import Recorder, TrainCall
from nemo_rl_mcore.tools.rehearse.shrink import put

Row = Mapping[str, float]


@dataclass
class Ran:
    """A recipe that ran in a layout: its metrics, and what each step trained on.

    critic_calls: the same of PPO's critic.
    digest: of the weights that engines of their own were sent last. version: the step that these are said to be of.
    folder: of all its files.
    """

    tree: Tree
    layout: Layout
    folder: Path
    rows: list[Row] = field(default_factory=list[Row])
    calls: list[list[TrainCall]] = field(default_factory=list[list[TrainCall]])
    critic_calls: list[list[TrainCall]] = field(default_factory=list[list[TrainCall]])
    digest: str = ""
    version: int | None = None

    @property
    def config(self) -> RunConfig:
        """Return the recipe as it ran."""
        return loaded(self.tree)

    @property
    def exported(self) -> Path:
        """Return the weights after the last step, as the ranks wrote them."""
        return self.folder / "hf"

    @property
    def split(self) -> Path:
        """Return the checkpoint after the last step, when all ranks train it by the split step."""
        return self.folder / "split"

    @property
    def killed(self) -> Path:
        """Return the folder of the run as it was after the first save."""
        return self.folder / "killed"

    def step(self, number: int, run: str = "run") -> Path:
        """Return the checkpoint after a step."""
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


def run_in(ran: Ran, session: RayCluster) -> None:
    """Run all steps, and keep a copy of the folder as it is after the first one.

    After the last one the weights are exported, and all ranks train that step once more by the split step.
    """
    recorder = Recorder()
    for row in train(ran.config, session=session, watch=recorder):
        ran.rows.append(row)
        ran.calls.append(recorder.take())
        ran.critic_calls.append(recorder.take("value"))
        if len(ran.rows) == 1:
            shutil.copytree(ran.folder / "run", ran.killed)
        elif not missing_family(ran.config.policy.model):
            recorder.export(ran.exported)
            ran.digest, ran.version = recorder.sent_digest(), recorder.sent_version()
            start, end = ran.step(1) / "policy", ran.split / "policy"
            recorder.train_split(ran.calls[-1], ran.config.policy, ran.layout.data, start, end)


def resumed(ran: Ran, session: RayCluster) -> list[Row]:
    """Resume the copy, kill a rank in the step that is left, and return the metrics of that step."""
    tree = copy.deepcopy(ran.tree)
    put(tree, "logger.log_dir", str(ran.killed))
    put(tree, "checkpointing.checkpoint_dir", str(ran.killed / "checkpoints"))
    put(tree, "cluster.max_trainer_restarts", 1)
    return [*train(loaded(tree), session=session, watch=Killer())]
