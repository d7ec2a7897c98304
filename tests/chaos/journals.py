"""Ranks and engines that write down what they do, and go wrong as a plan says.

Each process has a file of its own in the folder that the environment names, with a line before and one after each call,
on the disk before the call goes on. So what a killed process has done is known without asking the product.

A plan is `plan.json` in that folder: a list of `Fault`s as JSON objects. Each strikes once in a run, whichever process
of that name comes there first; a file `struck_<number>` with the time is there before it strikes.
"""

import errno
import hashlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_mcore.config import Role
from nemo_rl_mcore.engine.embedded import EmbeddedEngine
from nemo_rl_mcore.rank.refit.digests import of_all
from nemo_rl_mcore.rank.worker import MegatronPolicyWorker

FOLDER = "MEGATRON_TEST_JOURNALS"  # a variable that the product hands to ranks and engines


class PlantedError(ValueError):
    pass


@dataclass(frozen=True)
class Fault:
    """who: `rank_0`, `rank_1`, ... of the policy, `value_rank_0` and `teacher_rank_0` of others, or `engine`, whichever
    comes first.

    point: a method, before it does anything; a method with `:end`, once it is done and before it answers; or a place
    inside one: `start`, `get_topk_logits` and `forward`, `optimizer`, `save` and `write`, of a part of a checkpoint, of
    ranks, `decoding` of engines.
    nth: at which passage, counted by each process. seconds: of `slow`; of `kill`, how much later.
    """

    who: str
    point: str
    nth: int
    action: str
    seconds: float = 0.0

    def strike(self) -> None:
        match self.action:
            case "kill" if self.seconds:
                threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise PlantedError("a planted fault")
            case "slow":
                time.sleep(self.seconds)
            case "full":
                raise OSError(errno.ENOSPC, "No space left on device")
            case _:
                raise NotImplementedError(self.action)


class Journal:
    """folder: that of the environment, unless one is given. pid: of whom it is, where that is not this process."""

    def __init__(self, who: str, folder: Path | None = None, pid: int | None = None) -> None:
        self.folder, self.who = folder or Path(os.environ[FOLDER]), who
        self.pid = pid or os.getpid()
        plan = self.folder / "plan.json"
        faults = [Fault(**one) for one in json.loads(plan.read_text())] if plan.exists() else []
        self._faults = [(number, fault) for number, fault in enumerate(faults) if fault.who == who]
        self._passed: Counter[str] = Counter()
        self._file = os.open(self.folder / f"{who}.{self.pid}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, call: str, at: str, **facts) -> None:
        line = {"time": time.time(), "pid": self.pid, "call": call, "at": at, **facts}
        os.write(self._file, f"{json.dumps(line)}\n".encode())
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    @contextmanager
    def call(self, name: str, **facts) -> Iterator[dict]:
        """A call, of which the block may tell what came out."""
        found: dict = {}
        self.write(name, "begin", **facts)
        try:
            self.pass_by(name)
            yield found
        except BaseException as error:
            self.write(name, "raised", error=type(error).__name__, **facts)
            raise
        self.write(name, "end", **facts, **found)
        self.pass_by(f"{name}:end")

    def pass_by(self, point: str) -> None:
        self._passed[point] += 1
        for number, fault in self._faults:
            if fault.point == point and self._passed[point] >= fault.nth and self._first(number):
                fault.strike()

    def _first(self, number: int) -> bool:
        try:
            marker = os.open(self.folder / f"struck_{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        os.write(marker, json.dumps({"time": time.time(), "pid": os.getpid(), "who": self.who}).encode())
        os.fsync(marker)
        os.close(marker)
        return True


def digest(*parts) -> str:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part if isinstance(part, bytes) else repr(part).encode())
    return found.hexdigest()


def rows_of(data) -> list[list]:
    """[prompt, sample, digest of the tokens] of each row."""
    rows = zip(data["input_ids"].tolist(), data["input_lengths"].tolist(), strict=True)
    digests = [digest(ids[:length]) for ids, length in rows]
    return [
        list(row)
        for row in zip(data["prompt_index"].tolist(), data["sample_index"].tolist(), digests, strict=True)
    ]


def answered_rows(data, answered) -> list[str]:
    """Digests of prompts and their answers, as `rows_of` has them once they are trained on."""
    prompts = zip(data["input_ids"].tolist(), data["input_lengths"].tolist(), strict=True)
    answers = zip(answered["tokens"].tolist(), answered["lengths"].tolist(), strict=True)
    return [
        digest([*prompt[:first], *tokens[:length]])
        for (prompt, first), (tokens, length) in zip(prompts, answers, strict=True)
    ]


class JournaledMegatronPolicyWorker(MegatronPolicyWorker):
    """A rank of data parallelism: its digest is of all weights."""

    def __init__(self, *args, role="policy", trained=True, **kwargs) -> None:
        model = Role(role).value if trained else "teacher"
        prefix = "" if model == "policy" else f"{model}_"
        self.journal = Journal(f"{prefix}rank_{os.environ['RANK']}")
        self.journal.pass_by("start")
        super().__init__(*args, role=role, trained=trained, **kwargs)
        for method, point, before in (
            ("forward_backward", "forward", True),
            ("optimizer_step", "optimizer", False),
            ("save", "save", True),
        ):
            setattr(self.backend, method, self._passing(getattr(self.backend, method), point, before))
        from nemo_rl_mcore.rank.megatron.sharded_folder import (
            PreparedState,  # with Megatron, which only ranks import
        )

        PreparedState.write = self._passing(PreparedState.write, "write", before=True)
        self.journal.write("start", "end", weights=self._weights())

    def _passing(self, method, point, before):
        def run(*args, **kwargs):
            if before:
                self.journal.pass_by(point)
            result = method(*args, **kwargs)
            if not before:
                self.journal.pass_by(point)
            return result

        return run

    def _weights(self) -> str:
        tensors = (p.detach().contiguous() for chunk in self.backend.chunks for p in chunk.parameters())
        return digest(*(tensor.numpy().tobytes() for tensor in tensors))

    def generate(self, *, data, step, stop_ids, greedy=False):
        if greedy:
            return super().generate(data=data, step=step, stop_ids=stop_ids, greedy=greedy)
        with self.journal.call("generate", step=step) as found:
            answered = super().generate(data=data, step=step, stop_ids=stop_ids)
            found["rows"] = answered_rows(data, answered)
        return answered

    def get_topk_logits(self, **keys):
        self.journal.pass_by("get_topk_logits")
        return super().get_topk_logits(**keys)

    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        with self.journal.call("train", rows=rows_of(data)) as found:
            result = super().train(data, loss_fn, eval_mode, gbs, mbs)
            found["weights"] = self._weights()
        return result

    def begin_train_step(self, loss_fn, gbs=None, mbs=None, step_id=None):
        with self.journal.call("begin_train_step", step=int(step_id.split()[1]), weights=self._weights()):
            super().begin_train_step(loss_fn, gbs, mbs, step_id)

    def train_microbatch(self, data, chunk_id=None):
        with self.journal.call("train_microbatch", rows=rows_of(data)):
            super().train_microbatch(data, chunk_id)

    def finish_train_step(self):
        with self.journal.call("finish_train_step") as found:
            result = super().finish_train_step()
            found["weights"] = self._weights()
        return result

    def abort_train_step(self):
        with self.journal.call("abort_train_step"):
            super().abort_train_step()

    def prepare_for_lp_inference(self): ...

    def send_weights(self):
        with self.journal.call("send_weights"):
            return super().send_weights()

    def save_checkpoint(self, folder, wait=True):
        with self.journal.call("save_checkpoint", step=_step_of(folder), weights=self._weights()):
            super().save_checkpoint(folder, wait)

    def load_checkpoint(self, folder, weights_only=False):
        with self.journal.call("load_checkpoint", step=_step_of(folder)) as found:
            super().load_checkpoint(folder, weights_only)
            found["weights"] = self._weights()


def _step_of(folder: str) -> int:
    """.../step_4/policy, or .../tmp_step_4/policy."""
    return int(Path(folder).parent.name.rpartition("_")[2])


class JournaledEngine(EmbeddedEngine):
    def __init__(self, settings) -> None:
        self.journal = Journal("engine")
        super().__init__(settings)
        self.journal.write("start", "end")

    async def generate(self, requests, sampling, version=None, ticket=""):
        if version is not None:  # a validation, or the comparison at the start
            return await super().generate(requests, sampling, version, ticket)
        asked = digest([(list(request.prompt), request.seed) for request in requests])
        with self.journal.call("generate", ticket=ticket, asked=asked) as found:
            responses = await super().generate(requests, sampling, version, ticket)
            found["rows"] = [
                digest([*request.prompt, *response.tokens])
                for request, response in zip(requests, responses, strict=True)
            ]
            found["versions"] = digest([response.versions for response in responses])
        return responses

    async def _step(self, ticket, decoding, growing):
        self.journal.pass_by("decoding")
        return await super()._step(ticket, decoding, growing)

    async def begin_refit(self, version):
        with self.journal.call("begin_refit", version=version):
            await super().begin_refit(version)

    async def load_bucket(self, message):
        self.journal.pass_by("load_bucket")
        await super().load_bucket(message)

    async def finish_refit(self, version, sent):
        with self.journal.call("finish_refit", version=version, sent=of_all(sent)):
            return await super().finish_refit(version, sent)
