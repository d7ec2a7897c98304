#!/bin/bash
source "$(dirname -- "${BASH_SOURCE[0]}")/common.env"

# ===== BEGIN CONFIG =====
NUM_NODES=1
STEPS_PER_RUN=300
MAX_STEPS=300
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN)) # Round up
NUM_MINUTES=6
# ===== END CONFIG =====

run_recipe "$@"
check_metrics \
  'max(data["train/skipped_steps"]) == 0' \
  'max(data["train/token_mult_prob_error"]) < 1.001' \
  '0 < median(data["train/grad_norm"]) < 10' \
  '1 < mean(data["episodes/turns_mean"], -20) < 3' \
  'mean(data["train/reward"], 1, 6) < 0.1' \
  'mean(data["train/reward"], -20) > 0.9' \
  'data["validation/accuracy"]["300"] >= 0.8'
