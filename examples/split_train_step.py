# pyright: strict
"""Train steps in chunks, as a controller gives them to ranks over Ray; docs/split_train_step.md."""

import torch

from nemo_rl_mcore import BatchedDataDict, ClippedPGLossFn, Policy, RayCluster, RunStoppedError, load_config


def group(rows: int, length: int = 8) -> BatchedDataDict:
    """Return what rollout workers deliver: here random tokens, of which all but the first four are the response."""
    return BatchedDataDict(
        input_ids=torch.randint(0, 32, (rows, length)),
        input_lengths=torch.full((rows,), length),
        token_mask=(torch.arange(length) > 3).expand(rows, -1),
        sample_mask=torch.ones(rows),
        advantages=torch.randn(rows, 1).expand(-1, length),
        prev_logprobs=torch.full((rows, length), -3.5),
        generation_logprobs=torch.full((rows, length), -3.5),
    )


def main() -> None:
    """Take step 1, drop step 2, of which a group is too long for the model, and take step 2 without that group."""
    config = load_config("grpo_copy_cpu.yaml")
    loss = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0})
    steps = [(1, [group(6), group(3), group(7)]), (2, [group(8), group(4, 99)]), (2, [group(8)])]
    with RayCluster(config.cluster) as cluster, Policy(config.policy, cluster, seed=0) as policy:
        for step, groups in steps:
            policy.begin_train_step(loss, step_id=f"step {step}")
            try:
                for number, rows in enumerate(groups):
                    policy.train_microbatch(rows, chunk_id=f"group {number}")
                print(step, "samples", policy.finish_train_step()["all_mb_metrics"]["global_valid_seqs"])
            except (ValueError, RunStoppedError) as error:  # rows that are refused, a rank that failed
                policy.abort_train_step()  # all is as before the step; where ranks are gone, this raises
                print(step, "dropped:", error)


if __name__ == "__main__":
    main()
