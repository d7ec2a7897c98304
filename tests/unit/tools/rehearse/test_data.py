"""Made rows are read as the source's own are."""

import json
from pathlib import Path

import pytest

from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.source import KNOWN, SourceConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.rows import Row, RowReader
from nemo_rl_mcore.tools.rehearse.shrink import LONGEST, ROWS, is_here, made_source

ANSWERED = [{"dataset_name": name} for name in sorted({*KNOWN} - {"helpsteer3", "tulu3_preference"})]
OTHERS = [
    {"data_path": "x/y", "input_key": "a.b", "output_key": "a.c", "answer": {"regex": "is (.*)"}},
    {"data_path": "x/y", "output_key": None, "columns": ["level"]},
]


def read(keys: dict[str, object], kind: RowKind, folder: Path) -> list[Prompt]:
    section = made_source(SourceConfig.model_validate(keys), kind, folder / "rows.jsonl")
    source = SourceConfig.model_validate(section)
    assert is_here(source)
    reader = RowReader(source, kind, chat=True)
    lines = (folder / "rows.jsonl").read_text().splitlines()
    found = [reader.read(Row("rows", json.loads(line))) for line in lines]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("keys", [*ANSWERED, *OTHERS], ids=str)
def test_prompts(keys: dict[str, object], tmp_path: Path) -> None:
    found = read(keys, RowKind.PROMPTS, tmp_path)
    assert len({one.context or one.text for one in found}) == ROWS
    assert all(len(one.context or one.text) <= LONGEST and not one.unscored for one in found)


@pytest.mark.parametrize("name", ["helpsteer3", "tulu3_preference"])
def test_pairs(name: str, tmp_path: Path) -> None:
    found = read({"dataset_name": name}, RowKind.PAIRS, tmp_path)
    assert len(found) == ROWS
    assert all(one.answer != one.rejected for one in found)


def test_rows_of_the_hub_are_not_here() -> None:
    assert not is_here(SourceConfig(dataset_name="gsm8k", data_path="openai/gsm8k"))
