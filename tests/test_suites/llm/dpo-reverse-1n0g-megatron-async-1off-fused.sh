#!/bin/bash
source "$(dirname -- "${BASH_SOURCE[0]}")/common.env"

# ===== BEGIN CONFIG =====
NUM_NODES=1
STEPS_PER_RUN=125
MAX_STEPS=125
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN)) # Round up
NUM_MINUTES=3
# ===== END CONFIG =====

run_first warm_start sft_cpu.yaml 80 policy.init_checkpoint
run_recipe "$@"
check_metrics \
  'max(data["train/skipped_steps"]) == 0' \
  '0 < median(data["train/grad_norm"]) < 10' \
  'max(data["async/age_max"]) == 1' \
  '0.6931 < data["train/loss"]["1"] < 0.6932' \
  'data["validation/accuracy"]["125"] >= 0.9'
