#!/bin/bash
source "$(dirname -- "${BASH_SOURCE[0]}")/common.env"

# ===== BEGIN CONFIG =====
NUM_NODES=1
STEPS_PER_RUN=50
MAX_STEPS=50
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN)) # Round up
NUM_MINUTES=90
# ===== END CONFIG =====

run_recipe "$@"
check_metrics \
  'max(data["train/skipped_steps"]) == 0' \
  '0 < median(data["train/grad_norm"]) < 10' \
  'min(data["train/loss"]) >= 0' \
  'mean(data["train/loss"], -10) < mean(data["train/loss"], 1, 11)'
