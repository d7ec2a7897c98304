#!/bin/bash
source "$(dirname -- "${BASH_SOURCE[0]}")/common.env"

# ===== BEGIN CONFIG =====
NUM_NODES=1
STEPS_PER_RUN=150
MAX_STEPS=150
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN)) # Round up
NUM_MINUTES=3
# ===== END CONFIG =====

run_first teacher sft_teacher_cpu.yaml 400 teacher.init_checkpoint
run_recipe "$@"
check_metrics \
  'max(data["train/skipped_steps"]) == 0' \
  '0 < median(data["train/grad_norm"]) < 10' \
  'max(data["async/age_max"]) == 1' \
  'min(data["train/loss"]) >= 0' \
  'data["validation/accuracy"]["150"] >= data["teacher/validation/accuracy"]["400"] - 0.05'
