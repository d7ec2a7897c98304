"""Time and memory of fused linear log-probabilities, side by side with what others offer.

See `measuring` for how the methods take turns. Needs torch alone; a peer that cannot be imported is skipped with
a line that says so. `uv sync --group bench` installs the peers.

  python benchmarks/fused_linear_logprobs.py  # CPU, bf16, N=2048 H=512 V=32768
  python benchmarks/fused_linear_logprobs.py --dtype float32 --methods fused unfused
  python benchmarks/fused_linear_logprobs.py --device cuda  # H 2048, 4096, 8192; V=152064; TP shards

CPU times are of one thread. Memory is the peak that forward and backward add to the inputs, gradients included,
after a warm-up.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from measuring import Clock, alternate, header, in_subprocess, load, table
from torch import Tensor

TEMPERATURE = 0.7
HALF_MASKED = "fused, half masked"
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


def fused(masked: bool = False, **options: object) -> LogProbs:
    from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions, fused_linear_logprobs

    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        mask = (torch.arange(len(targets), device=targets.device) % 2).unsqueeze(1) if masked else None
        out = fused_linear_logprobs(
            hidden.unsqueeze(1),
            weight,
            targets.unsqueeze(1),
            temperature=TEMPERATURE,
            mask=mask,
            options=settings,
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
    HALF_MASKED: ("torch", lambda: fused(masked=True)),
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
    print(f"\n{problem}, {rounds} rounds, {load()}", flush=True)
    requests = {name: [name, asdict(problem)] for name in methods if importable(name)}
    median = alternate(__file__, requests, rounds)
    ceiling = in_subprocess(__file__, ["ceiling", asdict(problem)])
    rates = {
        name: 8 * problem.tokens * problem.hidden * problem.vocab / row["both"]
        for name, row in median.items()
        if name != HALF_MASKED
    }
    extra = {
        name: [f"{rate / 1e12:.2f}", f"{rate / ceiling['ceiling']:.0%}" if ceiling else "-"]
        for name, rate in rates.items()
    }
    header(("forward s", "fwd+bwd s", "peak MB"), ("TFLOP/s", "of matmul"))
    table(median, {"forward": 1, "both": 1, "peak": 1e6}, extra)


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
