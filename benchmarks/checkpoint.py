"""What a checkpoint has training wait for: one that is written at once, and one that is written in the background.

One rank of the GRPO recipe `examples/configs/grpo_copy_cpu.yaml`, of 8 layers of 512 and a vocabulary of 32 thousand
(45 million weights, 0.55 GB with Adam's moments), which trains on rows of 128 tokens. `blocked` is how long
`save_checkpoint` takes to return, `step` a train step right after it, `written` the time until the checkpoint is whole,
with that step where it is written in the background. Nothing else uses the second core.

  python benchmarks/checkpoint.py [--rounds 3] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import tempfile

from measuring import ROOT, Clock, alternate, header, load, table
from one_rank import batch, be_the_only_rank

ROWS, TOKENS, VOCAB = 4, 128, 32_768
SAVES = 3
MODEL = (
    *("policy.model.num_layers=8", "policy.model.hidden_size=512", "policy.model.ffn_hidden_size=1536"),
    *("policy.model.num_attention_heads=8", f"policy.model.vocab_size={VOCAB}", "cluster.gpus_per_node=1"),
    *(f"policy.model.max_position_embeddings={TOKENS}", f"policy.max_total_sequence_length={TOKENS}"),
    *(f"policy.train_global_batch_size={ROWS}", f"policy.train_micro_batch_size={ROWS}"),
    *(f"grpo.num_prompts_per_step={ROWS // 2}", "grpo.num_generations_per_prompt=2"),
)


def child(request: str) -> None:
    import torch

    from nemo_rl_mcore.losses import ClippedPGLossFn
    from nemo_rl_mcore.rank.worker import MegatronPolicyWorker
    from nemo_rl_mcore.recipe.load import load_config

    folder, wait = json.loads(request)
    torch.set_num_threads(1)
    be_the_only_rank()
    config = load_config(ROOT / "examples/configs/grpo_copy_cpu.yaml", [*MODEL])
    worker = MegatronPolicyWorker(config.policy, init_reference_model=False)
    data, loss_fn, clock = batch(ROWS, TOKENS, VOCAB), ClippedPGLossFn(config.loss_fn), Clock()
    worker.train(data, loss_fn)
    blocked, steps, written = [], [], []
    for _ in range(SAVES + 1):
        with tempfile.TemporaryDirectory(dir=folder) as target:
            began = clock.now()
            worker.save_checkpoint(f"{target}/policy", wait=wait)
            blocked.append(clock.now() - began)
            stepping = clock.now()
            worker.train(data, loss_fn)
            steps.append(clock.now() - stepping)
            worker.checkpoint_written()
            written.append(blocked[-1] if wait else clock.now() - began)
    figures = {"blocked s": blocked, "step s": steps, "written s": written}
    print(json.dumps({name: sorted(values[1:])[SAVES // 2] for name, values in figures.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="what to measure the disk of; the system's temporary one without it")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child)
        return
    print(f"{ROWS} rows of {TOKENS} tokens, {load()}", flush=True)
    methods = {"at once": [args.folder, True], "in the background": [args.folder, False]}
    columns = {"blocked s": 1, "step s": 1, "written s": 1}
    median = alternate(__file__, methods, args.rounds)
    header(columns)
    table(median, columns)


if __name__ == "__main__":
    main()
