"""What a run does when ranks raise or are gone, part by part, over fakes that are told when to fail."""

import signal
from contextlib import suppress

import pytest
from algorithm_fakes import loop_run, recipe, scheduled, trainer
from refusals import assert_holds

from nemo_rl_mcore.driver.algorithms.run_checkpoints import RunCheckpoints
from nemo_rl_mcore.driver.checkpoints import CheckpointStore
from nemo_rl_mcore.driver.signals import current_stop_signals, stop_signals
from nemo_rl_mcore.errors import RanksFailedError

LAST = 5


class Strikes:
    """Fails each time that it is called, until it has done so often enough."""

    def __init__(self, times=1, *, usable=False, final=False, group="policy", first=lambda: None):
        self.left, self.usable, self.final, self.group, self.first = times, usable, final, group, first

    def __call__(self):
        if not self.left:
            return
        self.left -= 1
        self.first()
        error = RanksFailedError("policy rank 1 went wrong\nmore of it")
        error.group, error.usable, error.final = self.group, self.usable, self.final
        raise error


def run_with(folder, events, *, restarts=3, period=2, loop=None, one_model=False, **top):
    store = None if folder is None else CheckpointStore(folder)
    checkpoints = RunCheckpoints(store, period, last_step=LAST, recipe="seed: 1\n")
    top |= {"cluster": {"max_trainer_restarts": restarts}, "checkpointing": {"enabled": True}}
    if one_model:  # and one optimizer step: an abort takes all of it back
        top["policy"] = {"train_global_batch_size": 12}
    run = loop_run({"max_num_steps": LAST} | (loop or {}), checkpoints, events=events, **top)
    if one_model:
        del run.models["value"]
    return run


def strike(run, model="policy"):
    """The model has lost ranks."""

    def lose():
        run.models[model].alive = False

    return lose


def steps_of(calls):
    return [call for call in calls if call.split()[0] in ("step", "redo") and "goes on" not in call]


def test_ranks_that_raise_have_the_step_undone_and_are_asked_again(tmp_path, capsys):
    run = run_with(tmp_path, {("update", 3): Strikes(2, usable=True)}, one_model=True, restarts=0)
    run.go()
    assert steps_of(run.calls) == ["step 1", "step 2", "step 3", "step 3", "step 3", "step 4", "step 5"]
    assert run.calls.count("abort policy") == 2
    assert not any(call.startswith(("restart", "load")) for call in run.calls)
    told = capsys.readouterr().err.splitlines()
    assert told == [f"policy rank 1 went wrong; it is tried again ({number} of 2)" for number in (1, 2)]
    assert run.notes.steps[LAST]["recovery/retries"] == 2


def test_what_is_raised_three_times_in_a_row_ends_the_run(tmp_path):
    run = run_with(tmp_path, {("update", 3): Strikes(3, usable=True)}, one_model=True)
    with pytest.raises(RanksFailedError):
        run.go()
    assert steps_of(run.calls)[-3:] == ["step 3"] * 3
    assert not any(call.startswith("restart") for call in run.calls)


def test_an_update_that_an_abort_does_not_undo_goes_back_to_the_checkpoint_on_the_same_ranks(tmp_path):
    run = run_with(tmp_path, {("update", 4): Strikes(usable=True)})
    run.go()
    at = run.calls.index("load policy")
    assert run.calls[at : at + 4] == ["load policy", "load value", "redo 3", "weights 3"]
    assert steps_of(run.calls) == ["step 1", "step 2", "step 3", "step 4", "redo 3", "step 4", "step 5"]
    assert not any(call.startswith("restart") for call in run.calls)


@pytest.mark.parametrize(("model", "other"), [("policy", "value"), ("value", "policy")])
def test_only_the_model_that_lost_ranks_gets_new_ones_and_both_go_back(tmp_path, model, other):
    dies = Strikes(group=model)
    run = run_with(tmp_path, {("update", 4): dies})
    dies.first = strike(run, model)
    run.go()
    assert run.calls.count(f"restart {model}") == 1
    assert f"restart {other}" not in run.calls
    assert run.calls.count("load policy") == run.calls.count("load value") == 1
    assert run.calls.index(f"restart {model}") < run.calls.index("load policy") < run.calls.index("redo 3")
    assert run.notes.steps[LAST]["recovery/redone_steps"] == 1


@pytest.mark.parametrize("part", ["validate", "save"])
def test_ranks_that_die_after_a_step_do_not_have_it_recorded_twice(tmp_path, part):
    dies = Strikes()
    run = run_with(tmp_path, {("validate", 4): dies} if part == "validate" else {}, loop={"val_period": 2})
    dies.first = strike(run)
    if part == "save":
        policy = run.models["policy"]
        save = policy.save_checkpoint

        def save_or_die(folder, **_keys):
            if folder.endswith("step_4/policy") or run.notes.steps.keys() >= {4}:
                dies()
            save(folder)

        policy.save_checkpoint = save_or_die
    run.go()
    assert steps_of(run.calls) == ["step 1", "step 2", "step 3", "step 4", "redo 3", "redo 4", "step 5"]
    assert [*run.notes.steps] == [1, 2, 3, 4, 5]
    assert [one.step for one in CheckpointStore(tmp_path).checkpoints()] == [2, 4, 5]


@pytest.mark.parametrize("restarts", [1, 3])
@pytest.mark.parametrize("stop", [Strikes, lambda **keys: interrupted], ids=["raised", "interrupted"])
def test_weights_that_are_older_than_the_last_step_are_not_saved_as_it(tmp_path, stop, restarts):
    run = run_with(
        tmp_path,
        {("update", 4): Strikes(usable=True), ("redo", 3): stop(times=9, usable=True)},
        restarts=restarts,
    )
    with pytest.raises((RanksFailedError, KeyboardInterrupt)):
        run.go()
    assert run.calls.count("save policy") == 1
    assert [one.step for one in CheckpointStore(tmp_path).checkpoints()] == [2]
    lost = "the weights of step 3 are lost (the ranks were being brought back to them); step 2 is saved in"
    assert lost in run.checkpoints.standing()


def interrupted():
    raise KeyboardInterrupt


def test_a_budget_that_is_spent_ends_the_run_and_says_so(tmp_path):
    dies = Strikes(3)
    run = run_with(tmp_path, {("update", 4): dies}, restarts=1)
    dies.first = strike(run)
    with pytest.raises(RanksFailedError) as told:
        run.go()
    assert told.value.__notes__ == ["cluster.max_trainer_restarts: 1 were used up"]


@pytest.mark.parametrize(
    "strikes",
    [Strikes(group="vllm"), Strikes(final=True), Strikes(group="vllm", usable=True)],
    ids=["an engine", "the session", "an engine that raised"],
)
def test_what_no_rank_can_mend_ends_the_run(tmp_path, strikes):
    run = run_with(tmp_path, {("update", 4): strikes})
    with pytest.raises(RanksFailedError):
        run.go()
    assert steps_of(run.calls)[-1] == "step 4"
    assert not any(call.startswith(("restart", "redo")) for call in run.calls)


def test_a_run_that_is_to_stop_is_not_kept_alive(tmp_path):
    with stop_signals():
        dies = Strikes(first=lambda: current_stop_signals().arrived.append(15))
        run = run_with(tmp_path, {("update", 4): dies})
        with pytest.raises((RanksFailedError, KeyboardInterrupt)):
            run.go()
    assert not any(call.startswith("restart") for call in run.calls)


@pytest.mark.parametrize(
    ("loss", "differs"), [(lambda loss, of_redo: loss + of_redo, True), (lambda *_: float("nan"), False)]
)
def test_a_step_that_comes_out_differently_is_told(tmp_path, capsys, loss, differs):
    """A loss that is no number both times is the same."""
    dies = Strikes()
    run = run_with(tmp_path, {("update", 4): dies})
    dies.first = strike(run)

    def with_loss(method, of_redo):
        def outcome_of(*step):
            outcome = method(*step)
            outcome.metrics["train/loss"] = loss(outcome.metrics["train/loss"], of_redo)
            return outcome

        return outcome_of

    run.algorithm.update = with_loss(run.algorithm.update, of_redo=False)
    run.algorithm.redo = with_loss(run.algorithm.redo, of_redo=True)
    run.go()
    said = capsys.readouterr().err
    assert_holds(said, "step 3 trained again")
    assert ("[3] differ" in said) is differs


def test_a_signal_that_comes_while_ranks_are_replaced_has_the_open_step_dropped(tmp_path):
    dies = Strikes()
    with stop_signals():
        run = run_with(tmp_path, {("update", 4): dies})
        policy = run.models["policy"]
        dies.first, restart = strike(run), policy.restart

        def restart_meanwhile():
            restart()
            signal.raise_signal(signal.SIGTERM)

        policy.restart = restart_meanwhile
        with pytest.raises(KeyboardInterrupt):
            run.go()
    assert steps_of(run.calls)[3:] == ["step 4", "redo 3"]
    assert [one.step for one in CheckpointStore(tmp_path).checkpoints()] == [2, 3]


def test_what_a_step_does_to_rows_is_not_kept():
    kept = {"checkpointing": {"enabled": True}, "cluster": {"max_trainer_restarts": 1}}
    algorithm, first = scheduled(trainer(recipe("grpo", **kept))), {}
    for attempt in ("fails", "is tried again"):
        with suppress(KeyError), algorithm.rollouts.open_step(1) as groups:
            batch = groups.whole().batch
            assert "new" not in batch
            before = first.setdefault("rewards", batch["rewards"].clone())
            assert batch["rewards"].equal(before)
            batch["rewards"] += 1
            batch["new"] = batch["rewards"]
            raise KeyError(attempt)


def test_weights_of_a_step_that_is_not_finished_are_not_saved_as_those_of_the_one_before(tmp_path):
    strikes = Strikes(usable=True)
    run = run_with(tmp_path, {("update", 4): strikes}, one_model=True, restarts=0)
    strikes.first = lambda: setattr(run.models["policy"], "updates", 1)
    with pytest.raises(RanksFailedError):
        run.go()
    assert [one.step for one in CheckpointStore(tmp_path).checkpoints()] == [2]
    assert_holds(run.checkpoints.standing(), "step 3 are lost")
