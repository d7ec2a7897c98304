"""Count what makes tests slow, in every Python process that finds this folder on PYTHONPATH: see tests/counting.py."""

import sys
from pathlib import Path

_FILE = Path(__file__).with_name("counts")
_IMPORTS = {
    "megatron.core": "Megatron imports",
    "nemo_rl_mcore.rank.megatron.parallel_groups": "rank processes",
}


def _count(what: str) -> None:
    with _FILE.open("a") as file:  # one short write, which no other process divides
        file.write(f"{what}\n")


def _heard(event: str, arguments: tuple[object, ...]) -> None:
    if event == "import":
        if (what := _IMPORTS.pop(str(arguments[0]), None)) is not None:
            _count(what)
    elif event == "open":
        if str(arguments[0]).endswith(".yaml"):
            _count("recipe files read")
    elif event == "subprocess.Popen" and "gcs_server" in str(arguments[0]):
        _count("Ray sessions")


sys.addaudithook(_heard)
