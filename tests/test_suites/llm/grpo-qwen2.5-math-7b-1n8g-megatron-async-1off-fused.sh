#!/bin/bash
source "$(dirname -- "${BASH_SOURCE[0]}")/common.env"

# ===== BEGIN CONFIG =====
NUM_NODES=1
STEPS_PER_RUN=30
MAX_STEPS=30
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN)) # Round up
NUM_MINUTES=120
# ===== END CONFIG =====

run_recipe "$@"
check_metrics \
  'max(data["train/skipped_steps"]) == 0' \
  'max(data["async/age_max"]) == 1' \
  'median(data["async/ess"]) > 0.8' \
  '0 < median(data["train/grad_norm"]) < 10'
