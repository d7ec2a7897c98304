"""By how much two ways to one number may differ in float32: the table of docs/numerics.md, for rehearsals and tests."""

# Parameters after up to three Adam steps at lr 1e-2, when the same sums were added in another order. Adam divides each
# gradient by its own size, so the rounding of a tiny gradient reaches its weight in full.
REORDERED = 5e-6
# Parameters after five such steps, when another algorithm computed the log-probabilities.
FIVE_STEPS = 1e-5
# Generation's own log-probabilities against those of get_logprobs.
GENERATION = 1e-4
# The split step against train, over the same microbatches: parameters after three Adam steps.
SPLIT_STEP = 1e-6
# Log-probabilities beside those of transformers.
TRANSFORMERS = 1e-4
# Metrics of a step.
METRICS = {"rel": 1e-4, "abs": 1e-5}
# The learning rate of a step against the recipe's, a share of it.
LEARNING_RATE = 1e-9
