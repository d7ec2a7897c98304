"""Ask models about a rollout before it is trained on."""

from nemo_rl_mcore.config import ClippedPGLossConfig, GRPOMasterConfig, PPOMasterConfig
from nemo_rl_mcore.config.prev_logprobs import reader_of_prev_logprobs
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.interfaces import PolicyInterface
from nemo_rl_mcore.losses import ClippedPGLossFn, LossFunction, make_loss


def model_inputs(batch: BatchedDataDict) -> BatchedDataDict:
    """Return what a pass without a loss needs of a batch."""
    return BatchedDataDict({key: batch[key] for key in ("input_ids", "input_lengths")})


def trained_inputs(batch: BatchedDataDict) -> BatchedDataDict:
    """Return what a pass needs that is asked about the trained tokens alone."""
    return BatchedDataDict(model_inputs(batch) | {"token_mask": batch["token_mask"]})


def policy_loss(config: GRPOMasterConfig | PPOMasterConfig) -> LossFunction:
    """Return the policy's loss; one without prev_logprobs where no pass before training gives them."""
    fused = config.policy.megatron_cfg.use_fused_linear_logprobs
    if reader_of_prev_logprobs(config) is not None:
        return make_loss(config.loss_fn, fused)
    return ClippedPGLossFn(config.loss_fn, fused, own_previous=True)


def add_logprobs(
    batch: BatchedDataDict, policy: PolicyInterface, loss: ClippedPGLossConfig, *, previous: bool = True
) -> None:
    """Add prev_logprobs, if asked for, and, where a KL penalty needs them, reference_policy_logprobs, fp32 [B, S].

    Both are 0 where token_mask is.
    """
    inputs = trained_inputs(batch)
    if previous:
        batch["prev_logprobs"] = policy.get_logprobs(inputs, trained_only=True)["logprobs"]
    if loss.reference_policy_kl_penalty != 0:
        reference = policy.get_reference_policy_logprobs(inputs, trained_only=True)
        batch["reference_policy_logprobs"] = reference["reference_logprobs"]
