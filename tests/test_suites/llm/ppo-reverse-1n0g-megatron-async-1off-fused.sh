#!/bin/bash
source "$(dirname -- "${BASH_SOURCE[0]}")/common.env"

# ===== BEGIN CONFIG =====
NUM_NODES=1
STEPS_PER_RUN=60
MAX_STEPS=60
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN)) # Round up
NUM_MINUTES=3
# ===== END CONFIG =====

run_first warm_start sft_cpu.yaml 80 policy.init_checkpoint
run_recipe "$@"
check_metrics \
  'max(data["train/skipped_steps"]) == 0' \
  '0 < median(data["train/grad_norm"]) < 10' \
  'max(data["async/age_max"]) == 1' \
  'median(data["async/ess"]) > 0.9' \
  'mean(data["value/residual_sq_mean"], -10) < data["value/residual_sq_mean"]["1"] / 10' \
  'data["validation/accuracy"]["60"] >= 0.9'
