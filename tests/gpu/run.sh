#!/usr/bin/env bash
# What one GPU can show, and two where a part needs them: bash tests/gpu/run.sh [first|kernels|worker|step|costs|refit|te|context|recipe|vllm|async|rehearsal|all] [--device cuda|cpu]
# The interpreter is $PYTHON (python3); the findings go to $OUT (results/gpu) as JSON, the table to standard output.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" tests/gpu/run.py "$@"
