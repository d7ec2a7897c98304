"""Any sequence of calls and failures on a fake backend, against a small model of the documented table of phases."""

import copy

import pytest
from fake_backend import FakeBackend, InjectedError, SumOfRewards, rows
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nemo_rl_mcore.rank.train_step import EMPTY_STEP, Phase, TrainStep, TrainStepError

STEP_IDS = st.sampled_from([None, "one", "two", "three"])
CHUNK_IDS = st.sampled_from([None, "a", "b"])
LATE = st.booleans()


class TrainStepMachine(RuleBasedStateMachine):
    """`phase`, `committed` and the like are the model; every row has a reward of its own, so rows can be told apart."""

    def __init__(self):
        super().__init__()
        self.backend = FakeBackend()
        self.step = TrainStep(self.backend)
        self.phase = Phase.IDLE
        self.step_id = None
        self.chunk_ids = set()
        self.rewards = []
        self.valid = 0
        self.unknown_outcome = False
        self.committed = set()
        self.last_result = None
        self.updates = []
        self.draws_at_begin = 0
        self.next_reward = 1.0

    # Calls

    @rule(
        step_id=STEP_IDS, fail_at=st.sampled_from([None, None, "snapshot", "zero_grad", "defer"]), late=LATE
    )
    def begin(self, step_id, fail_at, late):
        if fail_at == "defer":
            late = False  # late, it fails on leaving, and begin only enters
        call = lambda: self.step.begin(SumOfRewards(), gbs=4, mbs=2, step_id=step_id)  # noqa: E731
        if self.phase is not Phase.IDLE or step_id in self.committed:
            self._refused(call)
            return
        self.draws_at_begin = self.backend.draws
        failed = self._call(call, fail_at, late)
        if failed and fail_at == "snapshot":
            return
        self.phase = Phase.FAILED if failed else Phase.OPEN
        self.step_id, self.chunk_ids, self.rewards, self.valid = step_id, set(), [], 0
        self.last_result = None

    @rule(
        count=st.integers(0, 3),
        valid=st.booleans(),
        chunk_id=CHUNK_IDS,
        fail_at=st.sampled_from([None, None, None, "forward_backward"]),
        late=LATE,
    )
    def microbatch(self, count, valid, chunk_id, fail_at, late):
        rewards = [self.next_reward + i for i in range(count)]
        call = lambda: self.step.microbatch(rows(rewards, valid=valid), chunk_id)  # noqa: E731
        if self.phase is not Phase.OPEN or chunk_id in self.chunk_ids:
            self._refused(call)
            return
        self.next_reward += count
        if self._call(call, fail_at, late):
            self.phase = Phase.FAILED
            return
        self.rewards += rewards
        self.valid += count * valid
        self.chunk_ids |= {chunk_id} - {None}

    @rule(
        norm=st.sampled_from([2.0, 2.0, float("nan"), float("inf")]),
        fail_at=st.sampled_from(
            [
                None,
                None,
                None,
                None,
                "reduce",
                "lr",
                "scale",
                "defer",
                "finalize",
                "norm",
                "optimizer",
                "restore",
            ]
        ),
        late=LATE,
    )
    def finish(self, norm, fail_at, late):
        if fail_at == "defer":
            late = True
        if self.phase is Phase.IDLE and self.last_result is not None:
            before = self._everything()
            assert self.step.finish() is self.last_result
            assert self._everything() == before
            return
        if self.phase is not Phase.OPEN:
            self._refused(self.step.finish)
            return
        self.backend.norm = norm
        calls = len(self.backend.calls)
        results = []
        failed = self._call(lambda: results.append(self.step.finish()), fail_at, late)
        updated = "optimizer" in self.backend.calls[calls:]
        assert not updated or (self.valid and norm == 2.0)
        if failed:
            self.phase, self.unknown_outcome = Phase.FAILED, updated
            if updated and late:
                self.updates.append(self.rewards)
            return
        self._committed(results[0], norm)

    def _committed(self, result, norm):
        skipped = EMPTY_STEP if not self.valid else None if norm == 2.0 else f"the gradient norm is {norm}"
        assert result.outcome.skip_reason == skipped
        assert result.outcome.update_successful == (skipped is None)
        assert result.totals.valid_seqs == self.valid
        if skipped is None:
            self.updates.append(self.rewards)
        else:
            assert self.backend.draws == self.draws_at_begin
        self.phase = Phase.IDLE
        if self.step_id is not None:
            self.committed.add(self.step_id)
            self.last_result = result

    @rule(fail_at=st.sampled_from([None, None, "defer", "zero_grad", "restore"]), late=LATE)
    def abort(self, fail_at, late):
        if fail_at == "defer":
            late = True
        if self.unknown_outcome:
            self._refused(self.step.abort, "reload the checkpoint")
        elif self.phase is Phase.IDLE:
            before = self._everything()
            self.step.abort()
            assert self._everything() == before
        elif self._call(self.step.abort, fail_at, late):
            self.phase = Phase.FAILED
        else:
            self.phase = Phase.IDLE
            assert self.backend.gradient == []
            assert self.backend.draws == self.draws_at_begin

    @precondition(lambda self: self.unknown_outcome)
    @rule()
    def reload(self):
        """The remedy that abort names: a new process."""
        self.__init__()

    # The model's side

    def _call(self, call, fail_at, late):
        """Whether the call failed, which it may only where it was told to."""
        self.backend.fail_at, self.backend.fail_late = fail_at, late
        try:
            call()
        except InjectedError:
            return True
        finally:
            self.backend.fail_at = None
        return False

    def _refused(self, call, says="first|already"):
        before = self._everything()
        with pytest.raises(TrainStepError, match=says):
            call()
        assert self._everything() == before

    def _everything(self):
        step = {
            name: value for name, value in vars(self.step).items() if name not in ("_backend", "_resources")
        }
        # From Python 3.13 on, dataclasses that hold one NaN are not equal; their texts are.
        step["_last_result"] = repr(step["_last_result"])
        return copy.deepcopy((vars(self.backend), step))

    @invariant()
    def the_phase_is_the_tables(self):
        assert self.step.phase is self.phase

    @invariant()
    def reduction_is_held_back_exactly_while_open(self):
        if self.phase is not Phase.FAILED:
            assert self.backend.synchronised == (self.phase is Phase.IDLE)

    @invariant()
    def an_open_step_holds_its_own_rows_once(self):
        if self.phase is Phase.OPEN:
            assert self.backend.gradient == self.rewards

    @invariant()
    def each_commit_updates_once_and_no_row_is_trained_twice(self):
        assert self.backend.updates == self.updates
        assert self.backend.samples == 4 * len(self.updates)
        trained = [reward for update in self.updates for reward in update]
        assert len(trained) == len(set(trained))


TestTrainStepMachine = TrainStepMachine.TestCase
TestTrainStepMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
