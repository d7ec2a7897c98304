# pyright: strict
"""GRPO from Python on two CPU cores: own rows, own rewards, a tiny model with random weights; docs/python.md.

uv run python examples/train_in_python.py [FOLDER]
"""

import sys
from pathlib import Path

from nemo_rl_mcore import GRPO

MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "vocab_size": 32,
    "max_position_embeddings": 32,
    "init_method_std": 0.05,
}
ROWS: list[dict[str, object]] = [
    {"prompt": f"{n:03d}>", "answer": f"{n:03d}", "digits": 3} for n in range(1000)
]


def near(responses: list[str], answers: list[str]) -> list[float]:
    """Return the share of digits that are right, for each answer."""
    pairs = zip(responses, answers, strict=True)
    return [sum(a == b for a, b in zip(response, answer, strict=False)) / 3 for response, answer in pairs]


async def ended(finished: list[bool], responses: list[str], digits: list[int]) -> list[float]:
    """Return 1 for each answer that ended by itself, with as many digits as the row says."""
    rows = zip(finished, responses, digits, strict=True)
    return [float(end and len(response) == wanted) for end, response, wanted in rows]


def main(folder: Path) -> None:
    """Train, and print the mean rewards of each step."""
    run = GRPO(
        None,
        recipe={"policy": {"model": MODEL, "tokenizer": {"name": "char"}}},
        train=ROWS,
        reward=[near, ended],
        reward_weights={"ended": 0.25},
        steps=10,
        prompts_per_step=16,
        generations=16,
        lr=1e-3,
        max_length=8,
        max_new_tokens=4,
        gpus=0,
        out=folder,
    )
    for metrics in run:
        print(int(metrics["step"]), metrics["rewards/near_mean"], metrics["rewards/ended_mean"])
    print(run.generate("527>", samples=2))
    print(run.report())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "results/train_in_python"))
