"""Tolerances of fp32 comparisons, in one place. What is not named here is compared bit for bit."""

# One pass: log-probabilities against an independent computation.
LOGPROBS = 1e-5
# One backward pass: gradients against an independent computation, as a share of a tensor's largest entry.
GRADIENTS = 1e-5
# Parameters after up to three Adam steps at lr 1e-2, when the same sums were added in another order. Adam divides each
# gradient by its own size, so the rounding of a tiny gradient reaches its weight in full.
REORDERED = 5e-6
# Parameters after five such steps, when another algorithm computed the log-probabilities.
FIVE_STEPS = 1e-5
# Generation's own log-probabilities against those of get_logprobs.
GENERATION = 1e-4
# Metrics of a step.
METRICS = {"rel": 1e-4, "abs": 1e-5}
# The split step against train, over the same microbatches: parameters after three Adam steps.
SPLIT_STEP = 1e-6
# A combination of features against its plain sibling, over up to three steps: METRICS, REORDERED for each parameter,
# and the recipe's learning rate to the last bits.
LEARNING_RATE = 1e-9
# Metrics that count which of two numbers is the larger, where both are equal but for rounding, by algorithm and step:
# they are not compared. DPO begins with the weights of its reference.
TIES = {("dpo", 1): {"train/accuracy", "train/preference_accuracy"}}
