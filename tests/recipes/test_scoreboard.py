"""Rows of the scoreboard: what a rehearsal's JSON, and a recipe on paper, make of them."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import scoreboard
from scoreboard import NOT_RUN, Row

THEIRS = Path(__file__).parents[1] / "fixtures/nemo_rl"


def lines(*verdicts: str) -> dict[str, object]:
    return {
        "lines": [{"name": f"line {n}", "verdict": one, "why": "a\n b"} for n, one in enumerate(verdicts)]
    }


def test_a_row_has_the_first_line_that_failed() -> None:
    assert scoreboard.judged(lines("proven", "refused", "proven", "on a GPU")) == {
        "rehearsed": "yes", "proven": 2, "refused": 1, "reason": "",
    }  # fmt: skip
    failed = scoreboard.judged(lines("proven", "FAILED", "FAILED"))
    assert (failed["rehearsed"], failed["reason"]) == ("failed", "line 1: a b")


def test_the_last_row_of_a_recipe_counts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert scoreboard.read_rows(file) == {}
    rows = [Row("a", "clean", 0, NOT_RUN), Row("b", "refused", 3), Row("a", "clean", 0, "yes", 9, 2)]
    file.write_text("".join(f"{json.dumps(asdict(row))}\n" for row in rows))
    found = scoreboard.read_rows(file)
    assert found == {"a": rows[2], "b": rows[1]}
    text = [*scoreboard.table(found.values())]
    assert "rehearsed: 1 refused, 1 yes; of 2" in text
    assert text[-2:] == [
        "| a | clean | 0 | yes | 9 | 2 | 0 |  |",
        "| b | refused | 3 | refused | 0 | 0 | 0 |  |",
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "migrated", "rehearsed"),
    [
        ("grpo_math_1B_megatron.yaml", "clean", NOT_RUN),
        ("distillation_math_megatron.yaml", "refused", "refused"),
    ],
)
def test_a_recipe_on_paper(name: str, migrated: str, rehearsed: str) -> None:
    row = scoreboard.row_of(THEIRS / name, name, on_paper=True)
    assert (row.migrated, row.rehearsed) == (migrated, rehearsed)
    assert bool(row.reason) == (rehearsed == "refused")
