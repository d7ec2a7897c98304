#!/usr/bin/env bash
# README's first run for a few steps, and tests of configuration and worker, in about one minute: python_3_13.sh INTERPRETER
#
# In an environment next to the clone's, which stays as it is. .ci/run calls it.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_PYTHON=$1 UV_PROJECT_ENVIRONMENT=$folder/venv
unset VIRTUAL_ENV
uv run python -c 'import sys; print(sys.version); sys.exit(sys.version_info[:2] != (3, 13))'
uv run nemo-rl-mcore grpo --config examples/configs/grpo_copy_cpu.yaml grpo.max_num_steps=3 \
  grpo.val_period=0 "logger.log_dir=$folder/run" "checkpointing.checkpoint_dir=$folder/checkpoints"
uv run pytest -n 0 tests/unit/recipe/test_load.py tests/unit/driver/actors/test_lean_imports.py
