import errno
import random
import subprocess
import sys
from pathlib import Path

import pytest
from written_samples import sample

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability import RolloutSink, read_rollouts


def open_sink(log_dir: Path, resumed_step: int | None = None, **config) -> RolloutSink:
    return RolloutSink(log_dir, LoggerConfig(**config), resumed_step)


def write(sink: RolloutSink, *steps: int, **changes) -> None:
    for step in steps:
        sink.log(step, [sample(step, index, **changes) for index in range(2)])


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_step_and_its_validation_are_files_of_their_own_with_a_line_an_answer(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    answers = [sample(3, 0), sample(3, 1, advantage=float("nan"), response='né "\ud800')]
    sink.log(3, [*answers, sample(3, of_validation=True)])
    assert names(tmp_path) == ["rollouts/step_3.jsonl.gz", "rollouts/validation/step_3.jsonl.gz"]
    first, second = read_rollouts(tmp_path / "rollouts/step_3.jsonl.gz")
    assert first == vars(sample(3, 0))
    assert (second["sample_index"], second["advantage"], second["response"]) == (1, None, 'né "\ud800')
    (validated,) = read_rollouts(tmp_path / "rollouts/validation/step_3.jsonl.gz")
    assert validated["sample_mask"] is None
    sink.log(4, [])
    assert len(names(tmp_path)) == 2, "a step without answers has no file"


def test_turns_and_tokens_of_an_answer_stand_beside_a_number_that_is_not_finite(tmp_path: Path) -> None:
    turns = [{"role": "assistant", "content": "né", "reward": 0.5}]
    tokens = {"text": ["n", "é"], "turn": [1, 1], "mask": None, "advantages": [0.5, None]}
    sink = open_sink(tmp_path)
    sink.log(3, [sample(3, turns=turns, tokens=tokens, advantage=float("inf"))])
    (read,) = read_rollouts(tmp_path / "rollouts/step_3.jsonl.gz")
    assert (read["turns"], read["tokens"], read["advantage"]) == (turns, tokens, None)


def test_a_run_in_a_folder_that_another_has_left_puts_its_answers_aside(tmp_path: Path) -> None:
    for prompt in ("first>", "second>", "third>"):
        write(open_sink(tmp_path), 1, 2, prompt=prompt)
    prompts = {
        str(path.relative_to(tmp_path)): next(read_rollouts(path))["prompt"]
        for path in tmp_path.rglob("step_1.jsonl.gz")
    }
    assert prompts == {
        "rollouts.1/step_1.jsonl.gz": "first>",
        "rollouts.2/step_1.jsonl.gz": "second>",
        "rollouts/step_1.jsonl.gz": "third>",
    }


def test_a_resumed_run_puts_aside_what_lies_behind_its_step_and_only_that(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    write(sink, 1, 2, 3, 10)
    write(sink, 2, 3, of_validation=True)
    (tmp_path / "rollouts/step_11.jsonl.gz.tmp").write_bytes(b"the process died here")
    write(open_sink(tmp_path, resumed_step=2), 3, prompt="anew>")
    assert names(tmp_path) == [
        *(f"rollouts.1/{name}.jsonl.gz" for name in ("step_10", "step_3", "validation/step_3")),
        *(f"rollouts/{name}.jsonl.gz" for name in ("step_1", "step_2", "step_3", "validation/step_2")),
    ]
    assert next(read_rollouts(tmp_path / "rollouts/step_3.jsonl.gz"))["prompt"] == "anew>"
    assert next(read_rollouts(tmp_path / "rollouts.1/step_3.jsonl.gz"))["prompt"] == "1>"


@pytest.mark.parametrize("resumed", [False, True])
def test_at_the_bound_the_oldest_steps_go_but_every_tenth(
    resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(random.Random(0).choices("0123456789abcdef", k=4000))
    write(open_sink(tmp_path / "one"), 1, response=text)
    size = (tmp_path / "one/rollouts/step_1.jsonl.gz").stat().st_size
    monkeypatch.setattr("nemo_rl_mcore.driver.observability.sinks._MOST_BYTES", 4.5 * size)
    sink = open_sink(tmp_path)
    write(sink, *range(7, 13), response=text)
    if resumed:
        sink = open_sink(tmp_path, 12)
    write(sink, *range(13, 15), response=text)
    kept = [int(path.name.split("_")[1].split(".")[0]) for path in (tmp_path / "rollouts").iterdir()]
    assert sorted(kept) == [10, 12, 13, 14]


def test_nothing_is_removed_below_the_bound_and_nothing_written_where_that_is_switched_off(
    tmp_path: Path,
) -> None:
    write(open_sink(tmp_path), 1, 2)
    assert len(names(tmp_path)) == 2
    write(open_sink(tmp_path, answers_with_tokens=None), 1)
    assert names(tmp_path) == ["rollouts.1/step_1.jsonl.gz", "rollouts.1/step_2.jsonl.gz"]


def test_a_disk_that_is_full_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    """A limit of file size stands for the disk: the kernel refuses what is beyond it."""
    code = f"""
import json, resource, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability import RolloutSink
from written_samples import sample
import random
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
sink = RolloutSink(Path({str(tmp_path)!r}), LoggerConfig(), None)
for step, letters in ((1, 10), (2, 100_000)):
    answer = sample(step, response="".join(random.choices("0123456789", k=letters)))
    try:
        sink.log(step, [answer])
    except OSError as error:
        print(step, error.errno)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["2", str(errno.EFBIG)]
    assert names(tmp_path) == ["rollouts/step_1.jsonl.gz"]
