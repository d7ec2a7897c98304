"""Time and memory of fused linear log-probabilities, side by side with what others offer.

See `measuring` for how the methods take turns. Needs torch alone; a peer that cannot be imported is skipped with
a line that says so. `uv sync --group bench` installs the peers.

  python benchmarks/fused_linear_logprobs.py  # CPU, bf16, N=2048 H=512 V=32768
  python benchmarks/fused_linear_logprobs.py --dtype float32 --methods fused unfused
  python benchmarks/fused_linear_logprobs.py --device cuda  # H 2048, 4096, 8192; V=152064; TP shards

The last columns are rates beside those of the four or three matrix products alone, which take turns with the rest.
CPU times are of one thread. Memory is the peak that forward and backward add to the inputs, gradients included,
after a warm-up.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from measuring import Clock, alternate, header, load, table
from torch import Tensor

TEMPERATURE = 0.7
HALF_MASKED = "fused, half masked"
REPEATS = 3
PRODUCTS = {"four products": 4, "three products": 3}
"""What the heads are held against: the matrix products alone."""
TILE_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}


@dataclass(frozen=True)
class Problem:
    tokens: int
    hidden: int
    vocab: int
    dtype: str
    device: str


LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]
"""hidden [N, H], weight [V, H], targets [N] -> log-probabilities [N]."""


def auto() -> dict[str, object]:
    """What a run's budget of kept logits is to the kernel."""
    from nemo_rl_mcore.config.megatron import LOGITS_CACHE

    budget = LOGITS_CACHE
    return {"cache_bytes": budget.limit, "cache_bytes_per_logit": budget.bytes_per_logit}


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
    "fused, auto": ("pydantic", lambda: fused(**auto())),
    "fused, auto+main_grad": ("pydantic", lambda: fused(accumulate_main_grad=True, **auto())),
    "fused, full cache": ("torch", lambda: fused(cache_bytes=1 << 40)),
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
    if name.endswith("+main_grad"):
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


def bare_products(problem: Problem, count: int) -> Callable[[], None]:
    """The matrix products of a forward and backward alone, tile by tile into memory that is there already.

    Three are those of a head that keeps its logits, four those of one that computes them twice. Each has the layout
    that the device multiplies fastest.
    """
    hidden, weight, _, _ = inputs(problem)
    hidden, weight = hidden.detach(), weight.detach()
    width = max(TILE_BYTES[problem.device] // (problem.tokens * hidden.element_size()), 256)
    tile = (hidden @ weight[:width].t()).clone()
    logits, grad_hidden, wide = torch.empty_like(tile), torch.empty_like(hidden), hidden.t().contiguous()
    grad_weight, grad_wide = hidden.new_empty(width, problem.hidden), hidden.new_empty(problem.hidden, width)

    def run() -> None:
        for panel in weight.split(width):
            v = len(panel)
            for _ in range(count - 2):
                torch.mm(hidden, panel.t(), out=logits[:, :v])
            torch.mm(tile[:, :v], panel, out=grad_hidden)
            if problem.device == "cpu" and hidden.element_size() == 2:
                torch.mm(wide, tile[:, :v], out=grad_wide[:, :v])
            else:
                torch.mm(tile[:, :v].t(), hidden, out=grad_weight[:v])

    return run


def measure_products(name: str, problem: Problem) -> dict[str, float]:
    """As `measure`, with no forward of its own and no memory that it adds."""
    torch.set_num_threads(1)
    run, clock, times = bare_products(problem, PRODUCTS[name]), Clock(problem.device), []
    for _ in range(REPEATS + 1):
        start = clock.now()
        run()
        times.append(clock.now() - start)
    return {"forward": float("nan"), "both": min(times[1:]), "peak": float("nan")}


def child(request: str) -> None:
    what, problem = json.loads(request)
    problem = Problem(**problem)
    print(json.dumps((measure_products if what in PRODUCTS else measure)(what, problem)))


def importable(name: str) -> bool:
    if name not in PRODUCTS and importlib.util.find_spec(METHODS[name][0]) is None:
        print(f"  {name}: skipped, {METHODS[name][0]} is not installed")
        return False
    return True


def compare(problem: Problem, methods: list[str], rounds: int) -> None:
    print(f"\n{problem}, {rounds} rounds, {load()}", flush=True)
    requests = {name: [name, asdict(problem)] for name in [*methods, *PRODUCTS] if importable(name)}
    median = alternate(__file__, requests, rounds)
    bare = [median[name]["both"] if name in median else float("nan") for name in PRODUCTS]
    extra = {name: [f"{time / row['both']:.3f}" for time in bare] for name, row in median.items()}
    header(("forward s", "fwd+bwd s", "peak MB"), ("rate/4", "rate/3"))
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
