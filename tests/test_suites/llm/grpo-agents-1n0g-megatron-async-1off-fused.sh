#!/bin/bash
source "$(dirname -- "${BASH_SOURCE[0]}")/common.env"

# ===== BEGIN CONFIG =====
NUM_NODES=1
STEPS_PER_RUN=60
MAX_STEPS=60
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN)) # Round up
NUM_MINUTES=8
# ===== END CONFIG =====

run_first warm_start sft_agents_cpu.yaml 32 policy.init_checkpoint
run_recipe "$@"
check_metrics \
  'max(data["train/skipped_steps"]) == 0' \
  'max(data["episodes/dropped_rate"]) == 0' \
  'max(data["async/age_max"]) == 1' \
  'mean(data["train/reward"], 1, 6) < 1.0' \
  'mean(data["rewards/called_mean"], -10) > 0.45' \
  'mean(data["train/reward"], -10) > 1.1'
