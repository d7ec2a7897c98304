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


def test_new_ranks_without_a_checkpoint_begin_at_the_first_step(beside):
    train_all(beside, (1, 2))
    beside.die("rank_0", "rank_1")
    beside.new_ranks()
    train_all(beside)
    assert beside.problems() == []


def test_a_retry_after_an_abort_is_right_and_one_without_is_not(beside):
    fail_a_chunk(beside)
    beside.on_ranks("abort_train_step")
    train_all(beside, (2, 3))
    assert beside.problems() == []


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


def test_a_redo_that_skips_a_chunk_is_told(beside):
    train_all(beside, (1, 2))
    beside.die("rank_0", "rank_1")
    beside.new_ranks()
    beside.rows = lambda step, samples: Script.rows(beside, step, samples)[:1]
    beside.train(1)
    del beside.rows
    train_all(beside, (2, 3))
    assert {one.split(" ", 1)[1] for one in beside.problems()} >= {
        "step 1 was done again with other rows",
        "step 1 trained 0 rows that are not its own, or twice, and left out 2",
    }


def test_other_weights_after_a_redo_are_told_unless_kernels_differ(beside):
    train_all(beside, (1, 2))
    beside.die("rank_0", "rank_1")
    beside.new_ranks()
    beside.train(1, weights="others")
    beside.train(2, before="others")
    beside.train(3)
    assert any("gave other weights" in one for one in beside.problems())
    assert beside.problems(exact=False) == []


def test_rows_that_are_trained_twice_are_told(turns):
    turns.rows = lambda step, samples: [*Script.rows(turns, step, samples)] * 2
    turns.train(1)
    del turns.rows
    train_all(turns, (2, 3))
    assert any("trained 4 rows that are not its own, or twice" in one for one in turns.problems())


def test_an_answer_lost_with_its_engine_is_asked_for_again(tmp_path):
    script = Script(tmp_path, asynchronous=True)
    script.start()
    for position in range(5):
        script.answer(position)
    script.answer(5, at="")
    script.die("engine")
    script.answer(5, attempt=2)
    train_all(script)
    assert script.problems() == []


@pytest.mark.parametrize("lost", [True, False])
def test_requests_of_a_group_are_answered_again_only_where_one_of_them_was_lost(beside, lost):
    for sample in range(SAMPLES):
        beside.answer(6, asked=f"sample {sample}", attempt=f"1, call {sample}", rows=[f"row {sample}"])
    if lost:
        beside.answer(6, asked="another one", attempt="1, call 9", at="", rows=[])
        beside.die("engine")
    for sample in range(SAMPLES):
        beside.answer(6, asked=f"sample {sample}", attempt=f"2, call {sample}", rows=[f"row {sample}"])
    train_all(beside)
    told = [] if lost else ["group 6 was answered 2 times"] * SAMPLES
    assert beside.problems(answered=7) == told


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
    "another version 0": (lambda s: (s.die("engine"), s.refit(0, sent="others")), "version 0 names 2"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_wrong_answers_are_told(beside, name):
    go, told = ANSWERS[name]
    go(beside)
    train_all(beside)
    assert any(told in one for one in beside.problems()), beside.problems()


def test_a_command_that_goes_on_has_other_tickets_and_may_answer_again(beside):
    train_all(beside, (1,))
    beside.save(1)
    beside.train(2)
    beside.start_command()
    beside.pids["engine"] += 1000
    beside.new_ranks(load=1)
    for position in range(2, 6):
        beside.answer(position, rows=["again"] * SAMPLES)
    beside.rows = lambda step, samples: [[p, s, "again"] for p, s, _ in Script.rows(beside, step, samples)]
    beside.train(2)
    beside.train(3)
    assert beside.problems(repeats=False, exact=False) == []
    assert any("done again with other rows" in one for one in beside.problems())
    assert any("answered twice, differently" in one for one in beside.problems())


def test_a_group_without_an_answer_and_rows_from_nowhere_are_told(tmp_path):
    script = Script(tmp_path, asynchronous=True)
    script.start()
    for position in range(5):
        script.answer(position)
    train_all(script)
    problems = script.problems()
    assert any("never: [5]" in one for one in problems)
    assert any("step 3 trained 1 rows that nobody answered" in one for one in problems)


def test_rows_that_no_rank_answered_are_told(turns):
    train_all(turns, (1, 2))
    for who, sample in (("rank_0", 0), ("rank_1", 1)):
        turns.write(
            who, "train", answered=who == "rank_0", rows=[[5, sample, who], [9, sample, who]], weights="w3"
        )
    assert turns.problems() == ["rank_1: step 3 trained 2 rows that nobody answered"]


def test_a_line_that_was_cut_off_is_none(turns):
    train_all(turns)
    with (turns.folder / "rank_0.100.jsonl").open("a") as file:
        file.write('{"time": 99, "pid"')
    assert turns.problems() == []


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


def test_a_step_that_ends_between_two_passes_is_told(tmp_path):
    script = Script(tmp_path, asynchronous=False)
    twice(script, (1, 2))
    for who in ("rank_0", "rank_1", "value_rank_0", "value_rank_1"):
        script.write(who, "train", rows=script.rows(3, [int(who[-1])]), weights="w3 1")
    script.on_ranks("save_checkpoint", step=3, weights="w3 1")
    problems = script.problems(**TWO)
    assert any("saves as step 3 what is step 2.5" in one for one in problems)
    assert any("have [5] steps behind them, of 6" in one for one in problems)


def test_chosen_rows_are_any_of_their_prompt(tmp_path):
    script = Script(tmp_path, asynchronous=False)
    script.start()
    for step in (1, 2, 3):
        first, second = script.rows(step, [1])
        for who, row in (("rank_0", first), ("rank_1", second)):
            script.write(who, "train", rows=[row, row], weights=f"w{step}")
    assert script.problems(chosen=2) == []
    assert any("left out 2" in one for one in script.problems())
    assert any("left out 2" in one for one in script.problems(chosen=3))


def test_groups_that_are_not_trained_are_answered(beside):
    train_all(beside)
    assert beside.problems(answered=6) == []
    assert any("never: [6]" in one for one in beside.problems(answered=7))
