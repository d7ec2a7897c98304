#!/usr/bin/env bash
# The lowest versions that pyproject.toml allows, without Ray, vLLM and datasets: the parts of the GPU run that need no
# more, on CPU, then tests of what names torch and Megatron. About five minutes on two free cores, by hand.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 - > "$folder/requirements.txt" << 'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
left_out = ("ray", "datasets")
for line in project["project"]["dependencies"] + project["dependency-groups"]["dev"]:
    if not line.startswith((*left_out, "pyright", "ruff", "import-linter")):
        print(line)
PYTHON
# --no-config: the versions of [tool.uv] are those that development pins.
uv --no-config venv --quiet --python 3.12 "$folder/venv"
uv --no-config pip install --quiet --python "$folder/venv" --resolution lowest-direct --requirement "$folder/requirements.txt"
export PYTHON=$folder/venv/bin/python OUT=$folder/found PYTHONPATH=$PWD
"$PYTHON" -c 'import megatron.core as m, numpy, torch, transformers as t; print("torch", torch.__version__, "megatron-core", m.__version__, "transformers", t.__version__, "numpy", numpy.__version__)'
for part in kernels worker refit step te context; do
  bash tests/gpu/run.sh "$part" --device cpu > "$folder/table" 2> "$folder/log" || { cat "$folder/table" "$folder/log"; exit 1; }
  echo "$part: ok"
done
"$PYTHON" -m pytest -n 2 -q tests/unit/ops tests/unit/losses tests/unit/rank/megatron tests/distributed/test_output_processor.py
