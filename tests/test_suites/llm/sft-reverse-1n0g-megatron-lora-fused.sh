#!/bin/bash
source "$(dirname -- "${BASH_SOURCE[0]}")/common.env"

# ===== BEGIN CONFIG =====
NUM_NODES=1
STEPS_PER_RUN=240
MAX_STEPS=240
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN)) # Round up
NUM_MINUTES=3
# ===== END CONFIG =====

run_recipe "$@"
check_metrics \
  'max(data["train/skipped_steps"]) == 0' \
  '0 < median(data["train/grad_norm"]) < 10' \
  'mean(data["train/loss"], -10) < mean(data["train/loss"], 1, 11) / 2' \
  'data["validation/accuracy"]["240"] >= 0.4'
