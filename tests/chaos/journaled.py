"""A small run over ranks and engines that keep journals, seen from outside: what it says and when, what it leaves."""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from itertools import count, islice
from pathlib import Path

import grpo_run
from invariants import Expected
from journals import FOLDER, Fault
from processes import ProcessWatch

from nemo_rl_mcore.data.datasets import DigitTaskSource

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATHS = os.pathsep.join((str(HERE), str(ROOT), str(ROOT / "tests")))
CALL_S = 8.0
"""Deadline of the calls, which comes on top where a stopped process is to be told."""
GONE_S = 15.0
"""Seconds in which all processes of a run have to end, once its command has."""
GROUPS, SAMPLES, SEED = 8, 8, 42


@dataclass(frozen=True)
class Kind:
    """What differs between algorithms.

    models: those that are trained; frozen: those that are only read. passes: over the rows of a step, each of which is
    so many optimizer steps. chosen: rows of a group that are trained; None is all.
    """

    recipe: str
    models: tuple[str, ...] = ("policy",)
    frozen: tuple[str, ...] = ()
    passes: int = 1
    optimizer_steps: int = 1
    chosen: int | None = None
    corrects: bool = True
    more: tuple[str, ...] = ()

    @property
    def updates(self) -> int:
        return self.passes * self.optimizer_steps


_KL = "loss_fn.reference_policy_kl_penalty=0.05"
KINDS = {
    "grpo": Kind("grpo_copy_cpu.yaml", more=(_KL,)),
    "ppo": Kind("ppo_cpu.yaml", ("policy", "value"), passes=2, optimizer_steps=2, more=(_KL,)),
    "dpo": Kind("dpo_cpu.yaml", chosen=2, corrects=False),
    "distillation": Kind("distillation_cpu.yaml", frozen=("teacher",), corrects=False),
}


@cache
def teacher() -> str:
    """The override that names the weights of a teacher, which are there until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="teacher_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return grpo_run.teacher(folder)


@dataclass(frozen=True)
class Recipe:
    """age: of the oldest group; None is a synchronous run. machines: in name; each has its share of the ranks.

    chunk: groups of a chunk at least; None is whole steps. dynamic: groups of equal rewards are not trained on. agents:
    play the episodes, a process for each sample. background: so are checkpoints written.
    """

    age: int | None
    algorithm: str = "grpo"
    chunk: int | None = None
    dynamic: bool = False
    agents: bool = False
    background: bool = False
    steps: int = 12
    ranks: int = 2
    engines: int = 2
    period: int = 4
    restarts: int = 2
    engine_restarts: int = 2
    machines: int = 1
    more: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        return KINDS[self.algorithm]

    @property
    def exact(self) -> bool:
        """Whether the run is the same to the bit whatever dies in it."""
        return self.age in (None, 0) and self.chunk is None

    @property
    def how(self) -> str:
        name = {"ppo": "PPO, ", "dpo": "online DPO, ", "distillation": "distillation, "}.get(
            self.algorithm, ""
        )
        more = ", streamed" if self.chunk else ", dynamic sampling" if self.dynamic else ""
        more += ", agents" if self.agents else ""
        more += ", saved in the background" if self.background else ""
        return name + ("synchronous" if self.age is None else f"K = {self.age}") + more

    @property
    def overrides(self) -> tuple[str, ...]:
        section, kind = self.algorithm, self.kind
        rows = GROUPS * SAMPLES // kind.optimizer_steps
        given = (f"{section}.num_prompts_per_step={GROUPS}",)
        if kind.chosen is not None:  # a pair of each prompt
            rows, given = GROUPS, ()
        common = (
            *(*given, f"{section}.num_generations_per_prompt={SAMPLES}", "data.dataset_name=copy"),
            *(f"{section}.max_num_steps={self.steps}", f"{section}.val_period=0", "data.num_digits=3"),
            *(f"{section}.val_at_end=false", f"policy.train_global_batch_size={rows}", f"seed={SEED}"),
            f"policy.train_micro_batch_size={rows // self.ranks}",
            *("logger.tensorboard_enabled=false", f"cluster.num_nodes={self.machines}"),
            f"cluster.cpu_workers_per_node={self.ranks // self.machines}",
            f"cluster.max_trainer_restarts={self.restarts}",
            f"policy.megatron_cfg.checkpoint.async_save={self.background}",
            f"policy.call_timeout_s={CALL_S}",
            *("checkpointing.enabled=true", f"checkpointing.save_period={self.period}"),
            *(f"{section}.max_val_samples=64", *kind.more),
            *(teacher() for _ in kind.frozen),
            *("grpo.use_dynamic_sampling=true" for _ in range(self.dynamic)),
            *(
                f"+env.endpoint={{command: [{sys.executable}, {HERE / 'copy_agent.py'}]}}"
                for _ in range(self.agents)
            ),
        )
        return (*common, *self._beside(self.age), *self.more)

    def _beside(self, age: int | None) -> tuple[str, ...]:
        if age is None:
            return ()
        section = f"{self.algorithm}.async_{self.algorithm}"
        correction = (
            "loss_fn.use_importance_sampling_correction=true",
            "loss_fn.truncated_importance_sampling_type=tis",
            "loss_fn.truncated_importance_sampling_ratio=2.0",
        )
        return (
            *(f"{section}.enabled=true", "policy.generation.colocated.enabled=false"),
            f"{section}.max_trajectory_age_steps={age}",
            f"{section}.max_generation_failures={2 * GROUPS * (age + 1)}",
            *(f"{section}.min_groups_for_streaming_train={size}" for size in [self.chunk] if size),
            *(correction if self.kind.corrects else ()),
            f"policy.generation.engines={self.engines}",
            f"policy.generation.max_restarts={self.engine_restarts}",
        )

    def prompts(self, unused: Collection[int] = ()) -> dict[int, list[int]]:
        """Those of each step, in order; unused: positions of groups that no step trains on."""
        source = DigitTaskSource("copy", 3, SEED)
        drawn = (prompt.index for step in count(1) for prompt in source.train_batch(step, GROUPS))
        used = (prompt for position, prompt in enumerate(drawn) if position not in unused)
        return {step: [*islice(used, GROUPS)] for step in range(1, self.steps + 1)}

    def expected(self, unused: Collection[int] = (), **keys) -> Expected:
        kind = self.kind
        return Expected(
            self.prompts(unused),
            SAMPLES,
            self.ranks,
            asynchronous=self.age is not None,
            passes=kind.passes,
            models=kind.models,
            frozen=kind.frozen,
            chosen=kind.chosen,
            answered=self.steps * GROUPS + len(unused),
            repeats=self.exact,
            **keys,
        )


def note_start(journals: Path) -> None:
    (journals / f"started_{len([*journals.glob('started_*')])}").write_text(str(time.time()))


class JournaledRun(grpo_run.Run):
    """Starts when it is made; `close` ends whatever is left of it."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        faults: Iterable[Fault] = (),
        machines: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.watch, self.log_dir = folder, ProcessWatch(), folder / "log"
        self.journals, self.saved = folder / "journals", folder / "saved"
        self.journals.mkdir(parents=True, exist_ok=True)
        (self.journals / "plan.json").write_text(json.dumps([asdict(fault) for fault in faults]))
        note_start(self.journals)
        environment = {FOLDER: str(self.journals), "PYTHONPATH": PATHS, **(machines or {})}
        command = (
            *(sys.executable, str(HERE / "journaled_run.py"), recipe.algorithm),
            *("--config", str(ROOT / "examples/configs" / recipe.kind.recipe)),
            *(f"logger.log_dir={self.log_dir}", f"checkpointing.checkpoint_dir={self.saved}"),
            *recipe.overrides,
        )
        with (folder / "output").open("a") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **environment, **self.watch.environment},
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        self.watch.follow(self.process.pid)
        self.said: list[tuple[float, str]] = []
        """The lines of its stderr, each with the time of day."""
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append((time.time(), line.rstrip("\n")))

    def end(self, within_s: float) -> int | None:
        try:
            status = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        self._listener.join(5)
        return status

    def left(self) -> list[str]:
        if self.watch.all_gone(within_s=GONE_S):
            return []
        return [" ".join(title.split())[:80] for title in self.watch.alive().values()]

    def struck(self) -> list[dict]:
        found = []
        for marker in self.journals.glob("struck_*"):
            found.append(json.loads(marker.read_text()))
        return sorted(found, key=lambda one: one["time"])

    def text(self) -> str:
        return "\n".join(line for _, line in self.said)

    def unused(self) -> list[int]:
        """Positions of groups that no step trains on, as often as the log has them."""
        lines = (self.log_dir / "groups.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return [event["position"] for event in events if event["kind"] == "unused"]

    def strike(self, who: str, pid: int) -> None:
        marker = json.dumps({"time": time.time(), "pid": pid, "who": who})
        os.kill(pid, signal.SIGKILL)
        (self.journals / f"struck_{who}").write_text(marker)

    def close(self) -> None:
        self.watch.kill_all()
        self.process.wait()
        self._listener.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def a_run(
    recipe: Recipe, *faults: Fault, folder: Path | None = None, machines: Mapping[str, str] | None = None
) -> Iterator[JournaledRun]:
    """A run in a folder, of its own unless one is given, which goes with it then.

    machines: the environment of a driver that joins the cluster of `raylets.Raylets`.
    """
    own = Path(tempfile.mkdtemp(prefix="chaos_")) if folder is None else folder
    run = JournaledRun(own, recipe, faults, machines)
    try:
        yield run
    finally:
        run.close()
        if folder is None:
            shutil.rmtree(own, ignore_errors=True)
