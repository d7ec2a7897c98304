"""A run in one process: the product's loop, recovery, rollouts, ledger and checkpoints over a model and engines that
keep journals, and fail as a schedule says.

The weights of the model are a digest of all rows that have trained it, in order.
"""

import asyncio
import random
import sys
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "unit" / "driver" / "algorithms")]

from algorithm_fakes import Notes, train_result  # noqa: E402
from journals import Journal, answered_rows, digest, rows_of  # noqa: E402

from nemo_rl_mcore.data import BatchedDataDict  # noqa: E402
from nemo_rl_mcore.driver.algorithms.distillation import DistillationTrainer  # noqa: E402
from nemo_rl_mcore.driver.algorithms.dpo import DPOTrainer  # noqa: E402
from nemo_rl_mcore.driver.algorithms.grpo import GRPOTrainer  # noqa: E402
from nemo_rl_mcore.driver.algorithms.loop import TrainingLoop  # noqa: E402
from nemo_rl_mcore.driver.algorithms.ppo import PPOTrainer  # noqa: E402
from nemo_rl_mcore.driver.algorithms.run_checkpoints import open_checkpoints  # noqa: E402
from nemo_rl_mcore.driver.parts import open_parts  # noqa: E402
from nemo_rl_mcore.driver.rollouts.player import RolloutCollector  # noqa: E402
from nemo_rl_mcore.driver.rollouts.start import open_rollouts, read_saved  # noqa: E402
from nemo_rl_mcore.engine.engine import EngineFailedError  # noqa: E402
from nemo_rl_mcore.environment.interface import LocalEnvironments  # noqa: E402
from nemo_rl_mcore.errors import RanksFailedError  # noqa: E402
from nemo_rl_mcore.recipe.load import load_config  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples/configs"
GROUPS, SAMPLES, STEPS, PERIOD, TOKENS = 3, 2, 8, 3, 3


class DriverDiedError(BaseException):
    """Nothing of the product may catch it."""


@dataclass
class Chance:
    """Draws what goes wrong next, at most `most` times.

    The trainer and the engines draw apart, so that what one meets does not hang on how far the other has come.
    """

    seed: int
    rate: float
    most: int
    struck: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = {beside: random.Random(f"{self.seed} {beside}") for beside in (False, True)}

    def draw(self, point: str, actions: tuple[str, ...]) -> str:
        drawn = self._random[point == "respond"]
        happens, action = drawn.random() < self.rate, drawn.choice(actions)
        if not happens or len(self.struck) >= self.most:
            return ""
        self.struck.append(f"{point}: {action}")
        return action


@dataclass
class OneDeath(Chance):
    """The trainer dies once, at the n-th passage of a point; or something else happens there."""

    def __init__(self, point: str, nth: int, action: str = "die") -> None:
        self.struck, self._point, self._left, self._action = [], point, nth, action

    def draw(self, point: str, actions: tuple[str, ...]) -> str:
        self._left -= point == self._point
        if self._left or self.struck:
            return ""
        self.struck.append(point)
        return self._action


@dataclass
class FakeTrainer:
    """A `Policy` of one rank, a journal for each of its lives.

    raise: before anything; the ranks are as they were. fail: half way, so that an open step is to be aborted. die: half
    way. die_after, raise_after: all is done, and nobody is told. restart: the new ranks die at once.
    """

    folder: Path
    chance: Chance
    lives: Callable[[], int]
    name: str = "policy"

    def __post_init__(self) -> None:
        self._journal: Journal | None = None
        self.loads = 0
        self._begin_life()

    def _begin_life(self) -> None:
        if self._journal is not None:
            self._journal.close()
        prefix = "" if self.name == "policy" else f"{self.name}_"
        self._journal = Journal(f"{prefix}rank_0", self.folder, self.lives())
        self.weights, self.dead, self.committed = "start", False, []
        self._step, self._rows, self._failed = None, [], False
        self.updates = self._taken = 0
        self._copy: tuple[Path, str] | None = None
        self._looks = 0
        self._journal.write("start", "end", weights=self.weights)

    def close(self) -> None:
        self._journal.close()

    def _do(self, call: str, work: Callable[[], dict], **facts):
        """Run a call with a journal, in which something may go wrong."""
        if self.dead:
            raise self._error(f"{call} was not started: died before", usable=False)
        self._journal.write(call, "begin", **facts)
        action = self.chance.draw(call, ("raise", "raise_after", "fail", "die", "die_after", "driver"))
        if action == "driver":
            raise DriverDiedError
        if action in ("raise", "fail", "die"):
            self._journal.write(call, "raised", **facts)
            self.dead = action == "die"
            self._failed |= action == "fail" and self._step is not None
            raise self._error(f"{call}: planted {action}", usable=not self.dead)
        found = work()
        self._journal.write(call, "end", **facts, **found)
        if action in ("die_after", "raise_after"):
            self.dead = action == "die_after"
            raise self._error(f"{call}: planted {action}", usable=not self.dead)

    def _error(self, message: str, *, usable: bool) -> RanksFailedError:
        error = RanksFailedError(f"{self.name}: {message}")
        error.group, error.usable = self.name, usable
        return error

    def serves(self) -> bool:
        return not self.dead

    def restart(self) -> None:
        self._begin_life()
        if self.chance.draw("restart", ("die",)):
            self.dead = True
            raise self._error("the new ranks died", usable=False)

    def get_logprobs(self, data, trained_only=False):
        self._do("get_logprobs", dict)
        return BatchedDataDict(logprobs=torch.zeros(data["input_ids"].shape))

    def get_reference_policy_logprobs(self, data, trained_only=False):
        self._do("get_reference_policy_logprobs", dict)
        return BatchedDataDict(reference_logprobs=torch.zeros(data["input_ids"].shape))

    def get_values(self, data):
        self._do("get_values", dict)
        return BatchedDataDict(values=torch.zeros(data["input_ids"].shape))

    def get_topk_logits(self, data, k, trained_only=False):
        self._do("get_topk_logits", dict)
        return BatchedDataDict(topk_logits=torch.zeros(*data["input_ids"].shape, k))

    def generate(self, data, *, step, stop_ids, greedy):
        answered = answers_to(data, [0] * TOKENS).without(
            "weight_versions"
        )  # as ranks, which know no version
        self._do("generate", lambda: {"rows": answered_rows(data, answered)}, step=step)
        return answered

    def train(self, data, loss_fn, **sizes):
        rows = rows_of(data)
        self._do("train", lambda: {"weights": self._trained_on(rows)}, rows=rows)
        return self._result()

    def begin_train_step(self, loss_fn, *, gbs=None, mbs=None, step_id=None):
        step = int(step_id.split()[1])

        def work() -> dict:
            assert self._step is None
            assert not self._failed
            if step_id in self.committed:
                raise self._error(f"{step_id} is already committed", usable=True)
            self._step, self._rows = step, []
            return {}

        self._do("begin_train_step", work, step=step, weights=self.weights)

    def train_microbatch(self, data, *, chunk_id=None):
        rows = rows_of(data)

        def work() -> dict:
            assert self._step is not None
            assert not self._failed
            self._rows += rows
            return {}

        self._do("train_microbatch", work, rows=rows)

    def finish_train_step(self):
        def work() -> dict:
            assert self._step is not None
            assert not self._failed
            self.committed.append(f"step {self._step}")
            self._step = None
            return {"weights": self._trained_on(self._rows)}

        self._do("finish_train_step", work)
        return self._result()

    def abort_train_step(self):
        def work() -> dict:
            self._step, self._rows, self._failed = None, [], False
            return {}

        self._do("abort_train_step", work)

    def save_checkpoint(self, folder, *, wait=True):
        def work() -> dict:
            if wait:
                (Path(folder) / "weights").write_text(self.weights)
            else:
                self._copy, self._looks = (Path(folder) / "weights", self.weights), 1
            return {}

        self._do("save_checkpoint", work, step=_step_of(folder), weights=self.weights)

    def checkpoint_written(self, *, wait=True):
        def work() -> dict:
            if self._copy is not None and (wait or not self._looks):
                path, weights = self._copy
                path.write_text(weights)
                self._copy = None
            self._looks = 0
            return {}

        self._do("checkpoint_written", work)
        return 0.0 if self._copy is None else None

    def load_checkpoint(self, folder, *, weights_only=False):
        def work() -> dict:
            self.weights, self.loads = (Path(folder) / "weights").read_text(), self.loads + 1
            self._step, self._rows, self._failed, self.committed = None, [], False, []
            self._taken = 0
            return {"weights": self.weights}

        self._do("load_checkpoint", work, step=_step_of(folder))
        self.updates = 0

    def has_unknown_update(self) -> bool:
        return self._taken != self.updates

    def prepare_for_lp_inference(self): ...

    def send_weights(self) -> str:
        self._do("send_weights", dict)
        return self.weights

    def _trained_on(self, rows) -> str:
        self.weights = digest(self.weights, rows)
        self._taken += 1
        return self.weights

    def _result(self):
        self.updates += 1
        loss = float(int(self.weights[:6], 16))
        rewards = {"rewards_chosen_mean": [0.0, 0.0], "rewards_rejected_mean": [0.0, 0.0]}
        return train_result(loss=[loss, loss], accuracy=[0.0, 0.0], **rewards)


def _step_of(folder) -> int:
    return int(Path(folder).parent.name.rpartition("_")[2])


def answers_to(data, versions) -> BatchedDataDict:
    """Of three tokens, which follow from the prompt, the sample and the weights that draw each."""
    rows = zip(data["prompt_index"].tolist(), data["sample_index"].tolist(), strict=True)
    tokens = [[3 + (prompt + sample + 5 * version) % 11 for version in versions] for prompt, sample in rows]
    shape = (data.size, TOKENS)
    return BatchedDataDict(
        tokens=torch.tensor(tokens),
        logprobs=torch.full(shape, -1.0),
        lengths=torch.full((data.size,), TOKENS),
        finished=torch.ones(data.size, dtype=torch.bool),
        weight_versions=torch.tensor(versions).expand(shape),
    )


@dataclass
class FakeEngines:
    """An `EngineGeneration` with the weights of a `FakeTrainer`; raise: a group is not answered. None of them dies."""

    folder: Path
    trainer: FakeTrainer
    chance: Chance
    pid: int
    weights_digest: str = ""
    answering: bool = True
    joining: bool = False
    fleet: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(restarts=0))
    _version: int = -1

    def __post_init__(self) -> None:
        self._journal = Journal("engine", self.folder, self.pid)

    def close(self) -> None:
        self._journal.close()

    def update_weights(self, version):
        self.weights_digest, self._version = self.trainer.send_weights(), version
        self._journal.write("finish_refit", "end", version=version, sent=self.weights_digest)

    def generate(self, data, *, step, greedy=False):
        raise NotImplementedError

    def offload(self): ...

    def listen(self, changed): ...

    def rejoin(self): ...

    def whereabouts(self, ticket):
        return ""

    async def respond(self, data, *, step, ticket):
        asked = digest(step, data["prompt_index"].tolist(), data["sample_index"].tolist())
        facts = {"ticket": ticket, "asked": asked}
        self._journal.write("generate", "begin", **facts)
        action = self.chance.draw("respond", ("raise", "slow"))
        versions = []
        try:
            for _ in range(TOKENS):
                await asyncio.sleep({"slow": 0.01, "very slow": 0.2}.get(action, 0))
                versions.append(self._version)
            if action == "raise":
                raise EngineFailedError(f"{ticket}: planted")
        except BaseException:
            self._journal.write("generate", "raised", **facts)
            raise
        answered = answers_to(data, versions)
        rows = answered_rows(data, answered)
        self._journal.write("generate", "end", **facts, rows=rows, versions=digest(versions))
        return answered


def recipe(
    root: Path,
    age: int | None,
    chunk: int | None = None,
    algorithm="grpo",
    order="in_order",
    *,
    background: bool = False,
):
    """age: None is a synchronous run. chunk: groups of a chunk at least; None is whole steps. order: of consumption.

    background: the policy's checkpoints are written in the background; a critic's are not.
    """
    one, pairs = algorithm, algorithm == "dpo"
    rows = GROUPS if pairs else GROUPS * SAMPLES
    given = (
        *(f"logger.log_dir={root}/log", f"checkpointing.checkpoint_dir={root}/saved", f"{one}.val_period=0"),
        *("checkpointing.enabled=true", f"checkpointing.save_period={PERIOD}", f"{one}.val_at_end=false"),
        *(f"{one}.num_prompts_per_step={GROUPS}" for _ in range(not pairs)),
        *(f"{one}.num_generations_per_prompt={SAMPLES}", f"{one}.max_num_steps={STEPS}"),
        *(f"policy.train_global_batch_size={rows}", f"policy.train_micro_batch_size={rows}"),
        *("cluster.cpu_workers_per_node=1", "cluster.max_trainer_restarts=3"),
        f"policy.megatron_cfg.checkpoint.async_save={background}",
    )
    name = "grpo_copy" if algorithm == "grpo" else algorithm
    if age is None:
        return _without_weights(load_config(EXAMPLES / f"{name}_cpu.yaml", [*given]))
    section = f"{one}.async_{one}"
    beside = (
        f"{section}.max_trajectory_age_steps={age}",
        *(f"{section}.max_generation_failures=20", f"{section}.stall_timeout_s=20"),
        *(f"{section}.min_groups_for_streaming_train={size}" for size in [chunk] if size),
        f"{section}.order={order}",
    )
    return _without_weights(load_config(EXAMPLES / f"{name}_async_cpu.yaml", [*given, *beside]))


def _without_weights(config):
    """A fake teacher has none."""
    if config.algorithm != "distillation":
        return config
    return config.model_copy(update={"teacher": config.teacher.model_copy(update={"init_checkpoint": None})})


def start(root: Path, config, chance: Chance, lives: count) -> None:
    journals, parts = root / "journals", open_parts(config)
    checkpoints = open_checkpoints(config, lambda line: None)
    if checkpoints.nothing_left:
        return
    with ExitStack() as stack:
        models = {name: FakeTrainer(journals, chance, lambda: next(lives), name) for name in [*config.models]}
        for model in models.values():
            stack.callback(model.close)
        trainer = models["policy"]
        engine = _Turns(trainer)
        if config.asynchronous:
            engine = FakeEngines(journals, trainer, chance, next(lives))
            stack.callback(engine.close)
        environments = LocalEnvironments(parts.environments[""])
        collector = RolloutCollector(engine, parts.tokenizer, config.max_prompt_length, environments)
        step, saved = checkpoints.resumed_step or 0, read_saved(config, checkpoints.start)
        opened = open_rollouts(config, engine, parts.prompts, collector, step, saved, checkpoints.extra_parts)
        scheduler = stack.enter_context(opened)
        collector = replace(collector, generation=scheduler)
        notes = Notes()
        algorithm = _algorithm(config, models, (trainer, collector, parts.prompts, notes), scheduler)
        trained = {name: model for name, model in models.items() if config.models[name].trained}
        frozen = {name: model for name, model in models.items() if name not in trained}
        loop = TrainingLoop(config, algorithm, trained, scheduler, notes, checkpoints, frozen)
        deque(loop.steps(), maxlen=0)  # to its end


def _algorithm(config, models, common, scheduler):
    kind, more = {
        "grpo": (GRPOTrainer, {}),
        "ppo": (PPOTrainer, {"critic": models.get("value")}),
        "dpo": (DPOTrainer, {"pairs": None}),
        "distillation": (DistillationTrainer, {"teacher": models.get("teacher")}),
    }[config.algorithm]
    return kind(config, *common, rollouts=scheduler, **more)


@dataclass
class _Turns:
    trainer: FakeTrainer

    def generate(self, data, *, step, greedy=False):
        return self.trainer.generate(data, step=step, stop_ids=(), greedy=greedy)

    def update_weights(self, version): ...

    def offload(self): ...
