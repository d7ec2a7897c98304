"""The checker of journals, by made-up ones: a good run passes, and each broken invariant is told."""

import json

import pytest
from invariants import Expected, broken

pytestmark = pytest.mark.exhaustive  # of the judge itself

PROMPTS = {1: [5, 6], 2: [7, 8], 3: [5, 9]}
SAMPLES = 2
RANKS = ("rank_0", "rank_1")


class Script:
    """Two ranks that do a run together, and one engine, which has answered all where it is beside them."""

    def __init__(self, folder, *, beside=True):
        self.folder, self.beside, self.clock = folder, beside, 1
        self.pids = {"rank_0": 100, "rank_1": 101, "engine": 200}
        (folder / "started_1").write_text("1")
        self.new_ranks()
        if beside:
            self.refit(0)
            for position in range(6):
                self.answer(position)

    def do(self, steps):
        """Steps of "a method with positional arguments and key=value", apart by "; "."""
        for step in steps.split("; "):
            name, *given = step.split()
            places = [int(one) if one.isdigit() else one for one in given if "=" not in one]
            getattr(self, name)(*places, **dict(one.split("=") for one in given if "=" in one))

    def write(self, who, call, at="end", **facts):
        if call == "train":
            self.write(who, "generate", rows=[row for _, _, row in facts["rows"]])
        self.clock += 1
        pid = self.pids[who]
        line = {"time": self.clock, "pid": pid, "call": call, "at": at, **facts}
        with (self.folder / f"{who}.{pid}.jsonl").open("a") as file:
            file.write(f"{json.dumps(line)}\n")

    def on_ranks(self, call, at="end", **facts):
        for who in RANKS:
            self.write(who, call, at, **facts)

    def rows(self, step, samples, how="whole"):
        found = [[prompt, sample, f"row {step} {prompt}"] for prompt in PROMPTS[step] for sample in samples]
        strange = [[*row[:2], "from nowhere"] for row in found]
        return {"whole": found, "short": found[:1], "twice": found * 2, "strange": strange}[how]

    def answer(self, position, attempt=1, at="end", rows=""):
        step, place = divmod(position, 2)
        facts = {"ticket": f"group {position}, attempt 0.{attempt}", "asked": f"asked {position}"}
        self.write("engine", "generate", "begin", **facts)
        answered = rows.split(",") if rows else [f"row {step + 1} {PROMPTS[step + 1][place]}"] * SAMPLES
        if at:
            self.write("engine", "generate", at, **facts, rows=answered, versions=f"by {step}")

    def train(self, step, weights="", before="", finish="rank_0,rank_1", rows="whole"):
        """finish: the ranks that do; weights: after it, of each rank where they are two."""
        after = (weights or f"w{step}").split(",")
        for number, who in enumerate(RANKS):
            given, found = self.rows(step, [number], rows), after[number % len(after)]
            if not self.beside:
                self.write(who, "train", rows=given, weights=found)
                continue
            for at in ("begin", "end"):
                self.write(who, "begin_train_step", at, step=step, weights=before or f"w{step - 1}")
            self.write(who, "train_microbatch", rows=given)
            if who in finish.split(","):
                self.write(who, "finish_train_step", weights=found)

    def fail_a_chunk_and_finish(self, step):
        self.train(step, finish="")
        self.on_ranks("train_microbatch", "raised", rows=[])
        self.on_ranks("finish_train_step", weights=f"w{step}")

    def refit(self, version, sent=""):
        self.write("engine", "finish_refit", version=version, sent=sent or f"sent {version}")

    def save(self, step, weights=""):
        self.on_ranks("save_checkpoint", step=step, weights=weights or f"w{step}")

    def strike(self, who):
        marker = {"time": self.clock + 0.5, "pid": self.pids[who], "who": who}
        (self.folder / f"struck_{len([*self.folder.glob('struck_*')])}").write_text(json.dumps(marker))

    def die(self, *who):
        for one in who or RANKS:
            self.strike(one)
            self.pids[one] += 1000

    def new_ranks(self, load=None, weights="", first="w0"):
        self.on_ranks("start", weights=first)
        if load is not None:
            self.on_ranks("load_checkpoint", step=load, weights=weights or f"w{load}")

    def problems(self, **keys):
        return broken(self.folder, Expected(PROMPTS, SAMPLES, 2, self.beside, **keys))


@pytest.mark.parametrize("beside", [True, False])
def test_a_run_that_redoes_what_no_checkpoint_holds_is_right(beside, tmp_path):
    script = Script(tmp_path, beside=beside)
    script.do("train 1; save 1; train 2; train 3; die; new_ranks 1; train 2; train 3")
    assert script.problems() == []


LAST = "train 2; train 3"
WHOLE = f"train 1; {LAST}"


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ("train 1; train 3", "is trained after step 1"),
        (f"train 1; {WHOLE}", "step 1 is trained after step 1"),
        ("train 1; train 2", "have [2] steps behind them, of 3"),
        ("train 1; train 2 before=others; train 3", "that no step and no checkpoint gave"),
        ("train 1; train 2; train 3 finish=rank_0", "have [2, 3] steps"),
        (f"train 1 finish=; {WHOLE}", "while step 1 is open"),
        ("train 1; fail_a_chunk_and_finish 2", "was not aborted"),
        ("train 1; save 1; train 2; die; new_ranks 1 weights=w2", "other weights after loading step 1"),
        ("train 1; save 2 weights=w1", "saves as step 2 what is step 1"),
        ("train 1; save 2 weights=w1; new_ranks 1", "loads step 1, which it never saved whole"),
        ("train 1 weights=w1,others", "different weights after step 1"),
        (
            f"train 1; train 2; die; new_ranks; train 1 rows=short; {LAST}",
            "step 1 was done again with other rows",
        ),
        (
            "train 1; train 2; die; new_ranks; train 1 weights=others; train 2 before=others; train 3",
            "gave other weights",
        ),
        (f"train 1 rows=twice; {LAST}", "trained 4 rows that are not its own, or twice"),
        (f"train 1 rows=strange; {LAST}", "trained 2 rows that nobody answered"),
        ("die; new_ranks first=others", "begins with other weights"),
        (f"answer 5 attempt=2 at=; {WHOLE}", "on an engine that nothing had happened to"),
        (f"answer 5 attempt=2; {WHOLE}", "group 5 was answered 2 times"),
        (f"answer 5; {WHOLE}", "group 5, attempt 0.1 was asked 2 times"),
        (f"strike engine; answer 5 attempt=2 rows=a,b; {WHOLE}", "answered twice, differently"),
        (f"refit 2; refit 1; {WHOLE}", "went back to older weights"),
        (f"answer 7 rows=row,row; {WHOLE}", "never: [7]"),
        (f"die engine; refit 0 sent=others; {WHOLE}", "version 0 names 2"),
    ],
)
def test_what_is_wrong_is_told(tmp_path, steps, told):
    script = Script(tmp_path)
    script.do(steps)
    problems = script.problems()
    assert any(told in one for one in problems), problems


def twice(script, leave_out=None):
    """Two models that are trained twice on the rows of each step."""
    for who in (*RANKS, "value_rank_0", "value_rank_1"):
        script.pids.setdefault(who, len(script.pids) + 300)
        script.write(who, "start", weights="w0")
        for step in PROMPTS:
            rows = script.rows(step, [int(who[-1])])
            for again in (1, 2):
                short = (who, step, again) == leave_out
                script.write(who, "train", rows=rows[1:] if short else rows, weights=f"w{step} {again}")
            script.write(who, "save_checkpoint", step=step, weights=f"w{step} 2")


@pytest.mark.parametrize(("who", "model"), [("rank_0", "policy"), ("value_rank_1", "value")])
def test_each_model_trains_each_pass_over_a_step_once(who, model, tmp_path):
    script, two = Script(tmp_path, beside=False), {"passes": 2, "models": ("policy", "value")}
    twice(script)
    assert script.problems(**two) == []
    assert any("not 2 of each" in one for one in script.problems(passes=2))
    (tmp_path / "short").mkdir()
    script = Script(tmp_path / "short", beside=False)
    twice(script, leave_out=(who, 2, 2))
    left_out = "step 4 trained 0 rows that are not its own, or twice, and left out 1"
    assert script.problems(**two) == [f"{model}: {left_out}"]
