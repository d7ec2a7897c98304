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
  'max(data["async/age_max"]) == 2' \
  'mean(data["async/mixed_versions"]) > 0.05' \
  'median(data["async/ess"]) > 0.9' \
  'mean(data["train/reward"], 1, 6) < 0.1' \
  'mean(data["train/reward"], -20) > 0.95' \
  'data["validation/accuracy"]["240"] >= 0.9'
