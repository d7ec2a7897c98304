"""The checker of journals, by made-up ones: a good run passes, and each broken invariant is told."""

import json

import pytest
from invariants import Expected, broken

pytestmark = pytest.mark.exhaustive  # of the judge itself

PROMPTS = {1: [5, 6], 2: [7, 8], 3: [5, 9]}
SAMPLES = 2


class Script:
    """Two ranks that do a run together, and one engine; a test has them do something wrong."""

    def __init__(self, folder, asynchronous):
        self.folder, self.asynchronous, self.clock = folder, asynchronous, 0
        self.pids = {"rank_0": 100, "rank_1": 101, "engine": 200}

        self.start_command()

    def start_command(self):
        self.clock += 1
        (self.folder / f"started_{self.clock}").write_text(str(self.clock))

    def write(self, who, call, at="end", *, answered=True, **facts):
        if call == "train" and answered:
            self.write(who, "generate", rows=[row for _, _, row in facts["rows"]])
        self.clock += 1
        pid = self.pids[who]
        line = {"time": self.clock, "pid": pid, "call": call, "at": at, **facts}
        with (self.folder / f"{who}.{pid}.jsonl").open("a") as file:
            file.write(f"{json.dumps(line)}\n")

    def on_ranks(self, call, at="end", **facts):
        for who in ("rank_0", "rank_1"):
            self.write(who, call, at, **facts)

    def start(self):
        self.on_ranks("start", weights="w0")

    def rows(self, step, samples):
        return [[prompt, sample, f"row {step} {prompt}"] for prompt in PROMPTS[step] for sample in samples]

    def answer(self, position, attempt=1, at="end", rows=None, sent="w0", asked=None):
        step, place = divmod(position, 2)
        facts = {"ticket": f"group {position}, attempt 0.{attempt}", "asked": asked or f"asked {position}"}
        self.write("engine", "generate", "begin", **facts)
        rows = [f"row {step + 1} {PROMPTS[step + 1][place]}"] * SAMPLES if rows is None else rows
        if at:
            self.write("engine", "generate", at, **facts, rows=rows, versions=f"by {step}")

    def train(self, step, *, weights=None, before=None, shift=0, finish=True, ranks=("rank_0", "rank_1")):
        weights, before = weights or f"w{step}", before or f"w{step - 1}"
        for number, who in enumerate(("rank_0", "rank_1")):
            rows = self.rows(step, [(number + shift) % 2])
            if not self.asynchronous:
                self.write(who, "train", rows=rows, weights=weights)
                continue
            self.write(who, "begin_train_step", "begin", step=step, weights=before)
            self.write(who, "begin_train_step", step=step, weights=before)
            self.write(who, "train_microbatch", rows=rows)
            if finish and who in ranks:
                self.write(who, "finish_train_step", weights=weights)

    def refit(self, version, sent=None):
        self.write("engine", "finish_refit", version=version, sent=sent or f"sent {version}")

    def save(self, step, weights=None):
        self.on_ranks("save_checkpoint", step=step, weights=weights or f"w{step}")

    def die(self, *who):
        for one in who:
            self.struck(one)
            self.pids[one] += 1000

    def struck(self, who):
        marker = {"time": self.clock + 0.5, "pid": self.pids[who], "who": who}
        (self.folder / f"struck_{len([*self.folder.glob('struck_*')])}").write_text(json.dumps(marker))

    def new_ranks(self, load=None, weights=None, first="w0"):
        self.on_ranks("start", weights=first)
        if load is not None:
            self.on_ranks("load_checkpoint", step=load, weights=weights or f"w{load}")

    def problems(self, **keys):
        return broken(self.folder, Expected(PROMPTS, SAMPLES, 2, self.asynchronous, **keys))


@pytest.fixture
def beside(tmp_path):
    """Answers are all there, of an asynchronous run whose ranks have just started."""
    script = Script(tmp_path, asynchronous=True)
    script.start()
    script.refit(0)
    for position in range(6):
        script.answer(position)
    return script


@pytest.fixture
def turns(tmp_path):
    script = Script(tmp_path, asynchronous=False)
    script.start()
    return script


def train_all(script, steps=(1, 2, 3)):
    for step in steps:
        script.train(step)


@pytest.mark.parametrize("which", ["beside", "turns"])
def test_a_run_that_redoes_what_no_checkpoint_holds_is_right(which, request):
    script = request.getfixturevalue(which)
    train_all(script, (1,))
    script.save(1)
    train_all(script, (2, 3))
    script.die("rank_0", "rank_1")
    script.new_ranks(load=1)
    train_all(script, (2, 3))
    assert script.problems() == []


def fail_a_chunk(script):
    script.train(1)
    script.train(2, finish=False)
    script.on_ranks("train_microbatch", "raised", rows=[])


def finish_after_a_failed_chunk(script):
    fail_a_chunk(script)
    script.on_ranks("finish_train_step", weights="w2")


def load_what_is_not_what_was_saved(script):
    script.train(1)
    script.save(1)
    script.train(2)
    script.die("rank_0", "rank_1")
    script.new_ranks(load=1, weights="w2")


def save_under_another_number(script):
    script.train(1)
    script.save(2, weights="w1")
    script.new_ranks(load=1)


def hold_different_weights(script):
    for who, weights in (("rank_0", "w1"), ("rank_1", "others")):
        script.write(who, "begin_train_step", step=1, weights="w0")
        script.write(who, "train_microbatch", rows=script.rows(1, [int(who[-1])]))
        script.write(who, "finish_train_step", weights=weights)


def redo_without_a_row(script):
    train_all(script, (1, 2))
    script.die("rank_0", "rank_1")
    script.new_ranks()
    script.rows = lambda step, samples: Script.rows(script, step, samples)[:1]
    script.train(1)
    del script.rows
    train_all(script, (2, 3))


def redo_to_other_weights(script):
    train_all(script, (1, 2))
    script.die("rank_0", "rank_1")
    script.new_ranks()
    script.train(1, weights="others")
    script.train(2, before="others")
    script.train(3)


def train_rows_twice(script):
    script.rows = lambda step, samples: [*Script.rows(script, step, samples)] * 2
    script.train(1)
    del script.rows
    train_all(script, (2, 3))


def train_what_nobody_answered(script):
    script.rows = lambda step, samples: [
        [*row[:2], "from nowhere"] for row in Script.rows(script, step, samples)
    ]
    train_all(script)


# What is done, what is told of it, and whether the run came to its end.
WRONG = {
    "a step is left out": (lambda s: train_all(s, (1, 3)), "is trained after step 1", True),
    "a step is done twice": (lambda s: train_all(s, (1, 1, 2, 3)), "step 1 is trained after step 1", True),
    "the end is missing": (lambda s: train_all(s, (1, 2)), "have [2] steps behind them, of 3", True),
    "weights come from nowhere": (
        lambda s: (s.train(1), s.train(2, before="others"), s.train(3)),
        "that no step and no checkpoint gave",
        True,
    ),
    "a rank missed a step": (
        lambda s: (train_all(s, (1, 2)), s.train(3, ranks=("rank_0",))),
        "have [2, 3] steps",
        True,
    ),
    "begun over an open one": (
        lambda s: (s.train(1, finish=False), train_all(s)),
        "while step 1 is open",
        True,
    ),
    "a failed chunk": (finish_after_a_failed_chunk, "was not aborted", False),
    "loaded": (load_what_is_not_what_was_saved, "other weights after loading step 1", False),
    "saved as another": (save_under_another_number, "saves as step 2 what is step 1", False),
    "never saved": (save_under_another_number, "loads step 1, which it never saved whole", False),
    "different weights": (hold_different_weights, "different weights after step 1", False),
    "redone without a row": (redo_without_a_row, "step 1 was done again with other rows", True),
    "redone to other weights": (redo_to_other_weights, "gave other weights", True),
    "rows twice": (train_rows_twice, "trained 4 rows that are not its own, or twice", True),
    "rows from nowhere": (train_what_nobody_answered, "trained 2 rows that nobody answered", True),
    "begun elsewhere": (
        lambda s: (s.die("rank_0", "rank_1"), s.new_ranks(first="others")),
        "begins with other weights",
        False,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_history_is_told(beside, name):
    go, told, finished = WRONG[name]
    go(beside)
    problems = beside.problems(finished=finished)
    assert any(told in one for one in problems), problems


ANSWERS = {
    "given up on a living engine": (
        lambda s: s.answer(5, attempt=2, at=""),
        "on an engine that nothing had happened to",
    ),
    "answered in vain": (lambda s: s.answer(5, attempt=2), "group 5 was answered 2 times"),
    "asked under one ticket": (lambda s: s.answer(5), "group 5, attempt 0.1 was asked 2 times"),
    "answered differently": (
        lambda s: (s.struck("engine"), s.answer(5, attempt=2, rows=["a", "b"])),
        "answered twice, differently",
    ),
    "older weights": (lambda s: (s.refit(2), s.refit(1)), "went back to older weights"),
    "a group too many": (lambda s: s.answer(7, rows=["row"] * 2), "never: [7]"),
    "another version 0": (lambda s: (s.die("engine"), s.refit(0, sent="others")), "version 0 names 2"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_wrong_answers_are_told(beside, name):
    go, told = ANSWERS[name]
    go(beside)
    train_all(beside)
    assert any(told in one for one in beside.problems()), beside.problems()


def twice(script, steps=(1, 2, 3), leave_out=None):
    """Two models that are trained twice on the rows of a step."""
    for who in ("rank_0", "rank_1", "value_rank_0", "value_rank_1"):
        script.pids.setdefault(who, len(script.pids) + 300)
        script.write(who, "start", weights="w0")
        for step in steps:
            rows = script.rows(step, [int(who[-1])])
            for again in (1, 2):
                short = (who, step, again) == leave_out
                script.write(who, "train", rows=rows[1:] if short else rows, weights=f"w{step} {again}")
            script.write(who, "save_checkpoint", step=step, weights=f"w{step} 2")


TWO = {"passes": 2, "models": ("policy", "value")}


@pytest.mark.parametrize(("who", "model"), [("rank_0", "policy"), ("value_rank_1", "value")])
def test_each_model_trains_each_pass_over_a_step_once(who, model, tmp_path):
    script = Script(tmp_path, asynchronous=False)
    twice(script)
    assert script.problems(**TWO) == []
    assert any("not 2 of each" in one for one in script.problems(passes=2))
    (tmp_path / "short").mkdir()
    script = Script(tmp_path / "short", asynchronous=False)
    twice(script, leave_out=(who, 2, 2))
    assert script.problems(**TWO) == [
        f"{model}: step 4 trained 0 rows that are not its own, or twice, and left out 1"
    ]
