"""What models say of a rollout before it is trained on."""

from nemo_rl_mcore.config import ClippedPGLossConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.interfaces import PolicyInterface


def model_inputs(batch: BatchedDataDict) -> BatchedDataDict:
    """What a pass without a loss needs of a batch."""
    return BatchedDataDict({key: batch[key] for key in ("input_ids", "input_lengths")})


def add_logprobs(batch: BatchedDataDict, policy: PolicyInterface, loss: ClippedPGLossConfig) -> None:
    """Add prev_logprobs and, where a KL penalty needs them, reference_policy_logprobs, fp32 [B, S]."""
    inputs = model_inputs(batch)
    batch["prev_logprobs"] = policy.get_logprobs(inputs)["logprobs"]
    if loss.reference_policy_kl_penalty != 0:
        reference = policy.get_reference_policy_logprobs(inputs)
        batch["reference_policy_logprobs"] = reference["reference_logprobs"]
