"""Damage and poison the files of a checkpoint, one at a time, and load it: what happens is counted in a table.

  python tests/chaos/checkpoint_files.py            every case, some minutes
  python tests/chaos/checkpoint_files.py --every 9  each ninth

A damage must end as a ValueError that names folder and file, or change nothing. It is tried as a run goes on (whole),
by hand (the policy's folder alone), and by hand without checksums, as those of older versions: there what a number has
become cannot be noticed. The payload of an attack must not run; whoever attacks writes the right checksums.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
DEADLINE_S = 30.0


@dataclass(frozen=True)
class Finding:
    """What came of a case. verdict: refused, the same, another state (unverified only), or wrong."""

    case: str
    way: str
    verdict: str
    why: str = ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args(arguments)
    _prepare()
    with tempfile.TemporaryDirectory() as folder:
        damaged, attacked = run(Path(folder), options.every)
    sys.stdout.write(table("damaged files", damaged) + table("malicious files", attacked))
    return int(any(finding.verdict == "wrong" for finding in (*damaged, *attacked)))


def _prepare() -> None:
    """Be the only rank of a process group."""
    for folder in (TESTS / "chaos", TESTS / "distributed", TESTS):
        sys.path.insert(0, str(folder))
    import torch
    import torch.distributed as dist

    from nemo_rl_mcore.rank import accelerator

    torch.set_num_threads(1)
    accelerator.install(0)
    with tempfile.NamedTemporaryFile() as rendezvous:
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{rendezvous.name}.store", 1), rank=0, world_size=1
        )


def run(root: Path, every: int = 1) -> tuple[list[Finding], list[Finding]]:
    """Each `every`-th case, by this rank alone, in the folder."""
    import tiny

    sys.path.insert(0, str(TESTS / "chaos"))
    worker = tiny.worker(tiny.policy_config())
    worker.train(tiny.grpo_batch(seed=1), tiny.grpo_loss())
    step = _saved(worker, root)
    harness = _Harness(worker, step, root)
    return [*harness.damage(every)], [*harness.attack(every)]


def table(title: str, findings: list[Finding]) -> str:
    """Counts by way and verdict, and each case that went wrong."""
    verdicts = ("refused", "the same", "another state", "wrong")
    counts = Counter((finding.way, finding.verdict) for finding in findings)
    ways = list(dict.fromkeys(finding.way for finding in findings))
    lines = [f"{title}: {len({finding.case for finding in findings})}"]
    lines += ["| way | tries | " + " | ".join(verdicts) + " |", "|" + " --- |" * 6]
    for way in ways:
        numbers = [counts[way, verdict] for verdict in verdicts]
        lines.append(f"| {way} | {sum(numbers)} | " + " | ".join(map(str, numbers)) + " |")
    lines += [f"WRONG {one.case} ({one.way}): {one.why}" for one in findings if one.verdict == "wrong"]
    accepted = [f"{one.case} ({one.way})" for one in findings if one.verdict == "the same"]
    if accepted:
        lines.append(f"changed nothing: {'; '.join(accepted)}")
    return "\n".join(lines) + "\n\n"


def _saved(worker: Any, root: Path) -> Path:
    from chat_tokenizer import save_chat_tokenizer

    from nemo_rl_mcore.driver.checkpoints import CheckpointStore
    from nemo_rl_mcore.driver.run_folder import recipe_text
    from nemo_rl_mcore.recipe.load import load_config

    recipe = TESTS.parent / "examples" / "configs" / "grpo_copy_cpu.yaml"
    store = CheckpointStore(root / "checkpoints")
    folder = store.begin(1)
    (folder / "config.yaml").write_text(recipe_text(load_config(recipe)))
    save_chat_tokenizer(folder / "tokenizer")
    worker.save_checkpoint(str(folder / "policy"))
    store.commit(1, {"train/reward": 0.5}, {"total": 1})
    return root / "checkpoints" / "step_1"


class _Harness:
    """Loads copies of one checkpoint into one worker."""

    def __init__(self, worker: Any, step: Path, root: Path) -> None:
        import worker_state

        self._worker, self._step, self._root = worker, step, root
        self._state = worker_state
        worker.load_checkpoint(str(step / "policy"))  # clears gradients
        self._wanted = self._lasting()

    def damage(self, every: int) -> Iterator[Finding]:
        """Try the damages, each in every way."""
        from checkpoint_damages import copy_of, damages

        for damage in [*damages(self._step)][::every]:
            for way, load in (
                ("whole", self._go_on),
                ("by hand", self._by_hand),
                ("unverified", self._unverified),
            ):
                copy = copy_of(self._step, self._root / "copy")
                damage.change(copy)
                inside = damage.files[0].startswith("policy/")
                if way != "whole" and not inside:
                    continue
                yield self._try(damage.name, way, lambda load=load, copy=copy: load(copy), damage.files)

    def attack(self, every: int) -> Iterator[Finding]:
        """Try the attacks, with checksums that are right, and without any."""
        from checkpoint_damages import attacks, copy_of

        trap = self._root / "trapped"
        for attack in [*attacks()][::every]:
            for way, load in (("whole", self._go_on), ("unverified", self._unverified)):
                copy = copy_of(self._step, self._root / "copy")
                attack.change(copy, trap)
                _sum_up(copy)
                found = self._try(attack.name, way, lambda load=load, copy=copy: load(copy))
                if trap.exists():
                    trap.unlink()
                    found = Finding(attack.name, way, "wrong", "the payload ran")
                yield found

    def _try(self, case: str, way: str, load: Callable[[], None], files: tuple[str, ...] = ("",)) -> Finding:
        self._spoil()
        try:
            with _deadline():
                load()
        except ValueError as error:
            return Finding(case, way, *_judged(str(error), [self._root / "copy" / file for file in files]))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the table shows it
            return Finding(case, way, "wrong", f"{type(error).__name__}: {str(error)[:200]}")
        if self._state.differences(self._wanted, self._lasting()):
            verdict = "another state" if way == "unverified" else "wrong"
            return Finding(case, way, verdict, "loaded into another state")
        return Finding(case, way, "the same")

    def _go_on(self, step: Path) -> None:
        """As a run goes on, or generates."""
        from nemo_rl_mcore.config.base import ConfigError
        from nemo_rl_mcore.data.messages import Message
        from nemo_rl_mcore.data.tokenizer import load_tokenizer
        from nemo_rl_mcore.driver.checkpoints import read_checkpoint
        from nemo_rl_mcore.rank.checkpoints import POLICY_FOLDER
        from nemo_rl_mcore.tools.check.given_weights import load_recipe_of

        checkpoint = read_checkpoint(step)
        try:
            load_recipe_of(step)
        except ConfigError as error:
            raise ValueError(f"{step / 'config.yaml'}: {error}") from error
        try:
            load_tokenizer(str(step / "tokenizer")).render_chat(
                [Message("user", "a")], add_generation_prompt=True
            )
        except ValueError as error:
            raise ValueError(f"{step / 'tokenizer'}: {error}") from error
        self._worker.load_checkpoint(str(checkpoint.folder / POLICY_FOLDER))

    def _by_hand(self, step: Path) -> None:
        self._worker.load_checkpoint(str(step / "policy"))

    def _unverified(self, step: Path) -> None:
        self._worker.backend._verify_checksums = False
        try:
            self._by_hand(step)
        finally:
            self._worker.backend._verify_checksums = True

    def _spoil(self) -> None:
        """Change what a checkpoint sets back, so that one that sets nothing back is not taken for the same."""
        import torch

        with torch.no_grad():
            for tensor in self._state._tensors(self._worker).values():
                if tensor.is_floating_point():
                    tensor.add_(1.0)
        torch.rand(3)
        self._worker.backend.scheduler.num_steps = 0

    def _lasting(self) -> dict[str, Any]:
        found = self._state.capture(self._worker)
        return {
            name: value
            for name, value in found.items()
            if not name.startswith("gradient") and name != "config"
        }


def _judged(message: str, files: Sequence[Path]) -> tuple[str, str]:
    """Whether an error names the file (or, of an attack, one in the folder), in a message that can be read."""
    named = [
        *files,
        *(file.parent for file in files if file.name == ".metadata"),
    ]  # it describes those beside it
    if not any(str(file) in message for file in named):
        return "wrong", f"does not name {files[0].name}: {message[:300]}"
    if len(message) > 2000:
        return "wrong", f"{len(message)} characters long"
    return "refused", ""


def _sum_up(step: Path) -> None:
    """Write sizes and checksums of what is there now."""
    from nemo_rl_mcore.rank.checkpoints import SUMS_FILE, sha256, write_sums

    policy = step / "policy"
    files = [path for path in policy.rglob("*") if path.is_file() and path.name != SUMS_FILE]
    write_sums(policy, {str(path.relative_to(policy)): sha256(path) for path in files})
    info, path = None, step / "training_info.json"
    own = [one for one in step.rglob("*") if one.is_file() and one != path and one != step / SUMS_FILE]
    try:
        info = json.loads(path.read_bytes())
        info["files"] = {str(one.relative_to(step)): one.lstat().st_size for one in own}
        path.write_text(json.dumps(info))
    except ValueError:
        pass  # it is what was attacked
    write_sums(step, {str(one.relative_to(step)): sha256(one) for one in (*own, path)})


@contextmanager
def _deadline() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError(f"it hangs for {DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
