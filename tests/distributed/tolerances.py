"""Tolerances of fp32 comparisons, in one place. What is not named here is compared bit for bit."""

from nemo_rl_mcore.tools.rehearse.proofs import FIVE_STEPS as FIVE_STEPS
from nemo_rl_mcore.tools.rehearse.proofs import GENERATION as GENERATION
from nemo_rl_mcore.tools.rehearse.proofs import LEARNING_RATE as LEARNING_RATE
from nemo_rl_mcore.tools.rehearse.proofs import METRICS as METRICS
from nemo_rl_mcore.tools.rehearse.proofs import REORDERED as REORDERED
from nemo_rl_mcore.tools.rehearse.proofs import SPLIT_STEP as SPLIT_STEP

# One pass: log-probabilities against an independent computation.
LOGPROBS = 1e-5
# One backward pass: gradients against an independent computation, as a share of a tensor's largest entry.
GRADIENTS = 1e-5
# The same of a router's bias: a sum over tokens of what cancels, since the shares of a token's experts sum to 1. In the
# tiny models its largest entry is a tenth of those of its terms.
GRADIENTS_THAT_CANCEL = 5e-5
# The same of gated delta nets, whose norms enlarge the rounding of small heads: transformers in fp32 is as far away.
GRADIENTS_OF_DELTA_NETS = 1e-4
# Metrics that count which of two numbers is the larger, where both are equal but for rounding, by algorithm and step:
# they are not compared. DPO begins with the weights of its reference.
TIES = {("dpo", 1): {"train/accuracy", "train/preference_accuracy"}}
