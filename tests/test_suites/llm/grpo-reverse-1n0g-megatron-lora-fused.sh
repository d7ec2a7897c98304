#!/bin/bash
source "$(dirname -- "${BASH_SOURCE[0]}")/common.env"

# ===== BEGIN CONFIG =====
NUM_NODES=1
STEPS_PER_RUN=200
MAX_STEPS=200
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN)) # Round up
NUM_MINUTES=3
# ===== END CONFIG =====

run_first warm_start sft_cpu.yaml 80 policy.init_checkpoint
run_recipe "$@"
check_metrics \
  'max(data["train/skipped_steps"]) == 0' \
  'max(data["train/token_mult_prob_error"]) < 1.001' \
  '0 < median(data["train/grad_norm"]) < 10' \
  'data["validation/accuracy"]["200"] >= 0.9'
