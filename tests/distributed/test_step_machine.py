"""Any sequence of calls on a real one-rank worker: reads change nothing, refusals harm nothing, commits are exact."""

from functools import partial

import pytest
import tiny
import torch
import worker_state
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from injection import IN_FINISH, InjectedError, Point, failing

from nemo_rl_mcore.rank import train_step
from nemo_rl_mcore.rank.train_step import TrainStep, TrainStepError

# Without shrinking, which would take minutes on a real worker: the failing sequence is printed as it is.
SETTINGS = settings(
    phases=[Phase.generate],
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


STEP_IDS = st.sampled_from([None, "one", "two"])
CHUNKS = st.lists(
    st.tuples(st.sampled_from([0, 2, 4]), st.sampled_from([None, None, "a", "b"])), min_size=1, max_size=3
)

# The hold-back is entered in begin, where a failure on leaving it would have to be prepared.
POINTS = [point for point in IN_FINISH if point.call != "deferred_grad_sync"]
IN_CHUNK = Point("forward_backward", "after the first backward pass")


def in_phase(*names):
    return lambda self: self.phase.value in names


class WorkerMachine(RuleBasedStateMachine):
    """`phase`, `rows` and the ids are the model; `begun_at` is the worker's state when the open step began."""

    worker = None
    start = None
    commits = []  # noqa: RUF012 - shared on purpose: the numbers of chunks of all examples' commits
    aborts = 0
    refusals = 0  # of chunks, in an open step

    def __init__(self):
        super().__init__()
        worker_state.restore(self.worker, self.start)
        self.worker.train_step = TrainStep(self.worker.backend)
        self.phase = train_step.Phase.IDLE
        self.step_id = None
        self.rows = []
        self.chunk_ids = set()
        self.committed = set()
        self.last_result = None
        self.begun_at = None
        self.reads = {}  # what was read of the present weights
        self.seed = 0

    def teardown(self):
        self.worker.abort_train_step()

    # The four calls, where they fit

    @precondition(in_phase("idle"))
    @rule(step_id=STEP_IDS, chunks=CHUNKS)
    def begin(self, step_id, chunks):
        if step_id in self.committed:
            self._refused(lambda: self._begin(step_id))
            return
        self.worker.backend.zero_grad()  # what a former step left is no part of the state that abort restores
        self.begun_at = self._state()
        self._begin(step_id)
        self.phase, self.step_id, self.rows, self.chunk_ids = train_step.Phase.OPEN, step_id, [], set()
        self.last_result = None
        self._add(chunks)

    @precondition(in_phase("open"))
    @rule(chunks=CHUNKS)
    def microbatches(self, chunks):
        self._add(chunks)

    def _add(self, chunks):
        for count, chunk_id in chunks:
            chunk = self._batch().slice(0, count)
            call = partial(self.worker.train_microbatch, chunk, chunk_id)
            if chunk_id in self.chunk_ids:
                self._refused(call)
                continue
            call()
            self.rows.append(chunk)
            self.chunk_ids |= {chunk_id} - {None}

    @precondition(in_phase("open"))
    @rule()
    def finish(self):
        result = self.worker.finish_train_step()
        committed = self._state()
        whole = self._whole_step()
        assert result["update_successful"] == whole.outcome.update_successful == self._trains()
        assert result["all_mb_metrics"]["loss"] == pytest.approx([whole.totals.metrics["loss"]], rel=1e-6)
        self._agree(committed, self._state(), but=["generator"])
        self.phase, self.reads = train_step.Phase.IDLE, {}
        self.commits.append(len(self.rows))
        if self.step_id is not None:
            self.committed.add(self.step_id)
            self.last_result = result

    @precondition(lambda self: self.last_result is not None)
    @rule()
    def finish_again(self):
        again = self._read(self.worker.finish_train_step)
        assert again["all_mb_metrics"] == self.last_result["all_mb_metrics"]

    @precondition(in_phase("open", "failed"))
    @rule()
    def abort(self):
        self.worker.abort_train_step()
        self._agree(self.begun_at, self._state())
        self.phase = train_step.Phase.IDLE
        self._read(self.worker.abort_train_step)
        WorkerMachine.aborts += 1

    # Failures, and calls that do not fit

    @precondition(in_phase("open"))
    @rule(point=st.sampled_from([IN_CHUNK, *POINTS]))
    def failure(self, point):
        if not self._trains():
            point = IN_CHUNK
        chunk = partial(self.worker.train_microbatch, self._batch())
        call = chunk if point is IN_CHUNK else self.worker.finish_train_step
        with failing(self.worker, point), pytest.raises(InjectedError):
            call()
        self.phase = train_step.Phase.FAILED

    @rule()
    def call_out_of_order(self):
        chunk = self._batch()
        calls = {
            train_step.Phase.IDLE: [lambda: self.worker.train_microbatch(chunk)],
            train_step.Phase.OPEN: [self._begin, self._train],
            train_step.Phase.FAILED: [
                self._begin,
                self._train,
                lambda: self.worker.train_microbatch(chunk),
                self.worker.finish_train_step,
            ],
        }[self.phase]
        for call in calls:
            self._refused(call)
        self._refuse_rows()

    # Whatever else a controller may call

    @rule(name=st.sampled_from(["logprobs", "reference_logprobs", "evaluation", "dropout"]))
    def read(self, name):
        batch = tiny.grpo_batch()
        match name:
            case "logprobs":
                found = self._read(lambda: self.worker.get_logprobs(data=batch))[name]
            case "reference_logprobs":
                found = self._read(lambda: self.worker.get_reference_policy_logprobs(data=batch))[name]
            case "evaluation":
                found = self._read(
                    lambda: self.worker.train(batch, tiny.grpo_loss(), eval_mode=True)["global_loss"]
                )
            case "dropout":
                # No read: it draws from the generator, as a forward pass may.
                if self.phase is not train_step.Phase.IDLE:
                    torch.rand(3)
                return
        assert torch.equal(self.reads.setdefault(name, found), found)

    @precondition(in_phase("idle"))
    @rule()
    def train(self):
        samples = self.worker.backend.scheduler.num_steps
        assert self._train()["update_successful"]
        assert self.worker.backend.scheduler.num_steps == samples + 8
        self.last_result, self.reads = None, {}

    # The model's side

    def _batch(self):
        self.seed += 1
        return tiny.grpo_batch(seed=self.seed)

    def _begin(self, step_id=None):
        self.worker.begin_train_step(tiny.grpo_loss(), step_id=step_id)

    def _train(self):
        return self.worker.train(self._batch(), tiny.grpo_loss())

    def _trains(self):
        """Whether a row of the open step has a valid token."""
        return any(
            float((chunk["token_mask"][:, 1:] * chunk["sample_mask"][:, None]).sum()) for chunk in self.rows
        )

    def _state(self):
        return worker_state.capture(self.worker)

    def _agree(self, left, right, but=()):
        changed = [name for name in worker_state.differences(left, right) if name not in but]
        assert changed == [], changed

    def _read(self, call):
        before = self._state()
        result = call()
        self._agree(before, self._state())
        return result

    def _refuse_rows(self):
        """Rows that the loss cannot take are refused in every phase, which stays as it is."""
        lacking = ("advantages", "sample_mask")[self.seed % 2]
        broken = self._batch()
        del broken[lacking]
        self._refused(lambda: self.worker.train(broken, tiny.grpo_loss()), ValueError, lacking)
        if self.phase is train_step.Phase.OPEN:  # else there is no loss to judge them by
            self._refused(lambda: self.worker.train_microbatch(broken, "refused"), ValueError, lacking)
        WorkerMachine.refusals += self.phase is train_step.Phase.OPEN

    def _refused(self, call, kind=None, message=""):
        before = self._state()
        with pytest.raises(kind or TrainStepError, match=message):
            call()
        self._agree(before, self._state())

    def _whole_step(self):
        worker_state.restore(self.worker, self.begun_at)
        step = TrainStep(self.worker.backend)
        step.begin(tiny.grpo_loss(), gbs=8, mbs=2)
        rows = [chunk for chunk in self.rows if chunk.size]
        if rows:
            step.microbatch(tiny.BatchedDataDict.from_batches(rows))
        return step.finish()

    @invariant()
    def the_phase_is_the_tables(self):
        assert self.worker.train_step.phase is self.phase


def random_sequences_of_calls():
    config = tiny.policy_config(megatron={"scheduler": {"lr_decay_style": "linear", "lr_decay_iters": 100}})
    WorkerMachine.worker = tiny.worker(config)
    WorkerMachine.worker.train(tiny.grpo_batch(seed=100), tiny.grpo_loss())
    WorkerMachine.worker.backend.zero_grad()
    WorkerMachine.start = worker_state.capture(WorkerMachine.worker)
    run_state_machine_as_test(WorkerMachine, settings=SETTINGS)
    return WorkerMachine.commits, WorkerMachine.aborts, WorkerMachine.refusals


@pytest.mark.exhaustive
def test_no_sequence_of_calls_breaks_a_worker(ranks):
    commits, aborts, refusals = ranks(1).run(random_sequences_of_calls)[0]
    assert sum(chunks > 1 for chunks in commits) >= 5, "the sequences reach what they are to test"
    assert aborts >= 5
    assert refusals >= 5
