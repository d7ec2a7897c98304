#!/bin/bash
source "$(dirname -- "${BASH_SOURCE[0]}")/common.env"

# ===== BEGIN CONFIG =====
NUM_NODES=1
STEPS_PER_RUN=100
MAX_STEPS=100
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN)) # Round up
NUM_MINUTES=60
# ===== END CONFIG =====

run_recipe "$@"
check_metrics \
  'max(data["train/skipped_steps"]) == 0' \
  '0 < median(data["train/grad_norm"]) < 10' \
  '0.69 < data["train/loss"]["1"] < 0.70' \
  'mean(data["train/loss"], -10) < mean(data["train/loss"], 1, 11)'
