"""Time and memory of fused linear log-probabilities, side by side with what others offer.

Every measurement runs in a fresh subprocess; the methods take turns, and every other round runs them in
reverse order, so that a machine's drift and its other load fall on all of them. Needs torch alone; a peer
that cannot be imported is skipped with a line that says so. `uv sync --group bench` installs the peers.

  python benchmarks/fused_linear_logprobs.py  # CPU, bf16, N=2048 H=512 V=32768
  python benchmarks/fused_linear_logprobs.py --dtype float32 --methods fused unfused
  python benchmarks/fused_linear_logprobs.py --device cuda  # H 2048, 4096, 8192; V=152064; TP shards

Time on CPU is the CPU time of one thread; on CUDA it is the wall time between synchronisations. Memory is
the peak that forward and backward add to the inputs, gradients included: on CPU the high-water mark of the
resident set, reset after a warm-up (Linux); on CUDA that of torch's allocator.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
TEMPERATURE = 0.7
REPEATS = 3


@dataclass(frozen=True)
class Problem:
    tokens: int
    hidden: int
    vocab: int
    dtype: str
    device: str


LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]
"""hidden [N, H], weight [V, H], targets [N] -> log-probabilities [N]."""


def fused(**options: object) -> LogProbs:
    from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions, fused_linear_logprobs

    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        out = fused_linear_logprobs(
            hidden.unsqueeze(1), weight, targets.unsqueeze(1), temperature=TEMPERATURE, options=settings
        )
        return out.squeeze(1)

    settings = LinearLogprobsOptions(**options)
    return call


def unfused() -> LogProbs:
    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = (hidden @ weight.t()).float() / TEMPERATURE
        return torch.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    return call


def liger() -> LogProbs:
    """The selective log-probabilities inside Liger's fused PPO losses, at its own chunk size."""
    from liger_kernel.chunked_loss import fused_linear_ppo as ppo

    chunk = ppo._SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE
    apply = ppo._ChunkedSelectiveLogProbFunction.apply
    return lambda hidden, weight, targets: apply(hidden, weight, targets, None, TEMPERATURE, chunk)


def cut_cross_entropy() -> LogProbs:
    """It has no temperature, so it is given none: less work than the others do."""
    from cut_cross_entropy import linear_cross_entropy

    implementation = "cce_exact" if torch.cuda.is_available() else "torch_compile"
    return lambda hidden, weight, targets: (
        -linear_cross_entropy(hidden, weight, targets, reduction="none", impl=implementation)
    )


def trl() -> LogProbs:
    """The chunked log-probabilities of its GRPO trainer, without the optional outputs."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as CHUNK

    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return ChunkedLogProbFunction.apply(hidden, weight, None, targets, TEMPERATURE, CHUNK, None, 1.0, ())[
            0
        ]

    return call


METHODS: dict[str, tuple[str, Callable[[], LogProbs]]] = {
    "fused": ("torch", fused),
    "fused+main_grad": ("torch", lambda: fused(accumulate_main_grad=True)),
    "fused+cache": ("torch", lambda: fused(cache_bytes=1 << 40)),
    "unfused": ("torch", unfused),
    "liger": ("liger_kernel", liger),
    "cce": ("cut_cross_entropy", cut_cross_entropy),
    "trl": ("trl", trl),
}


def inputs(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    noise = torch.Generator(problem.device).manual_seed(0)
    like = {"device": problem.device, "dtype": getattr(torch, problem.dtype)}
    hidden = torch.empty(problem.tokens, problem.hidden, **like).normal_(generator=noise)
    weight = torch.empty(problem.vocab, problem.hidden, **like).normal_(generator=noise)
    weight.mul_(2 / problem.hidden**0.5)
    targets = torch.randint(0, problem.vocab, (problem.tokens,), generator=noise, device=problem.device)
    grad = torch.randn(problem.tokens, generator=noise, device=problem.device)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, grad


class Clock:
    """Seconds and bytes as the device counts them."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def now(self) -> float:
        if not self.cuda:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def start_memory(self) -> int:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return self._status("VmRSS")

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated() if self.cuda else self._status("VmHWM")

    @staticmethod
    def _status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def measure(name: str, problem: Problem) -> dict[str, float]:
    """Warm up, then the peak memory of one run, then the best times of several."""
    torch.set_num_threads(1)
    hidden, weight, targets, grad = inputs(problem)
    if name == "fused+main_grad":
        weight.main_grad = torch.zeros(weight.shape, device=weight.device)
    function, clock = METHODS[name][1](), Clock(problem.device)

    def run() -> tuple[float, float]:
        hidden.grad = weight.grad = None
        start = clock.now()
        out = function(hidden, weight, targets)
        middle = clock.now()
        out.backward(grad)
        return middle - start, clock.now() - start

    run()
    hidden.grad = weight.grad = None
    before = clock.start_memory()
    run()
    peak = clock.peak_memory() - before
    forward, both = (min(times) for times in zip(*(run() for _ in range(REPEATS)), strict=True))
    return {"forward": forward, "both": both, "peak": peak}


def matmul_ceiling(problem: Problem) -> float:
    """Operations a second of the four products of forward and backward, on 4096 tokens at a time."""
    rows = min(problem.tokens, 4096)
    hidden, weight, _, _ = inputs(replace(problem, tokens=rows))
    hidden, weight = hidden.detach(), weight.detach()
    tile, clock = hidden @ weight.t(), Clock(problem.device)
    times = []
    for _ in range(REPEATS + 1):
        start = clock.now()
        for a, b in ((hidden, weight.t()), (hidden, weight.t()), (tile, weight), (tile.t(), hidden)):
            torch.mm(a, b)
        times.append(clock.now() - start)
    return 8 * rows * problem.hidden * problem.vocab / min(times[1:])


def in_subprocess(what: str, problem: Problem) -> dict[str, float] | None:
    """Measure in a fresh process; None, with a printed line, if that failed (out of memory, say)."""
    command = [sys.executable, __file__, "--child", json.dumps([what, asdict(problem)])]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Inductor's compile workers outlive the child and would hold its pipes open.
    environment = os.environ | {"PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if run.returncode != 0:
        print(f"  {what}: failed: {(run.stderr.strip().splitlines() or ['no message'])[-1][:150]}")
        return None
    return json.loads(run.stdout.splitlines()[-1])


def child(request: str) -> None:
    what, problem = json.loads(request)
    problem = Problem(**problem)
    if what == "ceiling":
        torch.set_num_threads(1)
        print(json.dumps({"ceiling": matmul_ceiling(problem)}))
    else:
        print(json.dumps(measure(what, problem)))


def importable(name: str) -> bool:
    if importlib.util.find_spec(METHODS[name][0]) is None:
        print(f"  {name}: skipped, {METHODS[name][0]} is not installed")
        return False
    return True


def compare(problem: Problem, methods: list[str], rounds: int) -> None:
    print(f"\n{problem}, {rounds} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs", flush=True)
    methods = [name for name in methods if importable(name)]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    for turn in range(rounds):
        for name in methods if turn % 2 == 0 else reversed(methods):
            if (result := in_subprocess(name, problem)) is not None:
                results[name].append(result)
    ceiling = in_subprocess("ceiling", problem)
    report(problem, results, ceiling["ceiling"] if ceiling else None)


def report(problem: Problem, results: dict[str, list[dict[str, float]]], ceiling: float | None) -> None:
    """Medians over the rounds, and in brackets how many times those of the first method they are."""
    median = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in results.items()
        if runs
    }
    if not median:
        return
    base = next(iter(median.values()))
    print(
        f"  {'method':16} {'forward s':>18} {'fwd+bwd s':>18} {'peak MB':>18} {'TFLOP/s':>8} {'of matmul':>9}"
    )
    for name, row in median.items():
        cells = [
            f"{row[key] / unit:.3f} ({row[key] / base[key]:.2f})"
            for key, unit in (("forward", 1), ("both", 1), ("peak", 1e6))
        ]
        rate = 8 * problem.tokens * problem.hidden * problem.vocab / row["both"]
        share = f"{rate / ceiling:.0%}" if ceiling else "-"
        print("  " + f"{name:16} " + " ".join(f"{c:>18}" for c in cells) + f" {rate / 1e12:8.2f} {share:>9}")
    print(f"  load {os.getloadavg()[0]:.1f}", flush=True)


def problems(args: argparse.Namespace) -> list[Problem]:
    cuda = args.device == "cuda"
    tokens = args.tokens or (16384 if cuda else 2048)
    sizes = args.hidden or ([2048, 4096, 8192] if cuda else [512])
    vocab = args.vocab or (152_064 if cuda else 32_768)
    shards = args.tp or ([1, 4, 8] if cuda else [1])
    return [
        Problem(tokens, hidden, vocab // tp, args.dtype, args.device) for hidden in sizes for tp in shards
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--hidden", type=int, nargs="+")
    parser.add_argument("--vocab", type=int, help="whole vocabulary, before tensor parallelism")
    parser.add_argument(
        "--tp", type=int, nargs="+", help="sizes of the tensor-parallel group, one shard each"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child)
        return
    for problem in problems(args):
        compare(problem, args.methods, args.rounds)


if __name__ == "__main__":
    main()
