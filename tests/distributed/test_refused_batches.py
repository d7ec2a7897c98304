"""Rows that a model or a loss cannot take are refused on every rank that they reach, and leave no trace."""

import pytest
import tiny
import torch
import worker_state
from refusals import refused

from nemo_rl_mcore.config import ClippedPGLossConfig
from nemo_rl_mcore.losses import DistillationLossFn, make_loss
from nemo_rl_mcore.rank.train_step import Phase

# The stages of a pipeline, the parts of a layer, and one rank alone.
LAYOUTS = {
    "one": (1, {}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}


def broken_batches():
    """A batch for each kind of mistake, and what is said of it."""

    def replaced(key, change):
        batch = tiny.grpo_batch(seed=5)
        batch[key] = change(batch[key])
        return batch

    lacking = tiny.grpo_batch(seed=5)
    del lacking["advantages"]
    return {
        "advantages: missing": lacking,
        "advantages: shape [8, 11]": replaced("advantages", lambda values: values[:, 1:]),
        "prev_logprobs: int64": replaced("prev_logprobs", torch.Tensor.long),
        "prev_logprobs: inf": replaced("prev_logprobs", lambda values: torch.full_like(values, torch.inf)),
        "generation_logprobs: nan": replaced("generation_logprobs", lambda values: values * torch.nan),
        "input_ids: 32": replaced("input_ids", lambda ids: ids + tiny.VOCABULARY - ids.max()),
        "input_lengths: 13": replaced("input_lengths", lambda lengths: lengths + 1),
    }


def refusals_in_an_open_step(megatron):
    """What a step is with refused chunks between its chunks, and without: weights; and what was left unsaid."""

    def step(worker, broken):
        unsaid = []
        worker.begin_train_step(tiny.grpo_loss())
        for first, chunk_id in ((0, "a"), (4, "b")):
            before = worker_state.capture(worker)
            for told, batch in broken.items():
                with refused("batch") as caught:
                    worker.train_microbatch(batch, chunk_id)
                unsaid += [] if f"\n  {told}" in str(caught.value) else [(told, str(caught.value))]
            assert worker_state.differences(before, worker_state.capture(worker)) == []
            assert worker.train_step.phase is Phase.OPEN
            worker.train_microbatch(tiny.grpo_batch().slice(first, first + 4), chunk_id)
        assert worker.finish_train_step()["update_successful"]
        return worker_state.capture(worker), unsaid

    worker = worker_state.with_dropout(tiny.worker(tiny.policy_config(megatron=megatron)))
    worker.train(tiny.grpo_batch(seed=1), tiny.grpo_loss())
    worker.backend.zero_grad()
    start = worker_state.capture(worker)
    plain, _ = step(worker, {})
    worker_state.restore(worker, start)
    found, unsaid = step(worker, broken_batches())
    return worker_state.differences(plain, found), unsaid


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_refused_chunk_leaves_the_step_as_it_was_bit_for_bit(ranks, layout):
    world_size, megatron = LAYOUTS[layout]
    assert ranks(world_size).run(refusals_in_an_open_step, megatron) == [([], [])] * world_size


def refusals_of_whole_calls(megatron):
    """The calls of a worker that took wrong rows; then it reads and trains as if nothing had been."""
    worker = tiny.worker(tiny.policy_config(megatron=megatron))
    worker.train(tiny.grpo_batch(), tiny.grpo_loss())
    worker.backend.zero_grad()
    before = worker_state.capture(worker)
    long = tiny.grpo_batch(length=65)
    foreign = tiny.grpo_batch()
    foreign["input_ids"] = foreign["input_ids"] + 1
    prompts = foreign | {"prompt_index": torch.arange(8), "sample_index": torch.arange(8)}
    # The second step is wrong, and the first is not made.
    late = tiny.BatchedDataDict.from_batches([tiny.grpo_batch(), foreign])
    calls = {
        "logprobs": lambda: worker.get_logprobs(data=long),
        "reference": lambda: worker.get_reference_policy_logprobs(data=long),
        "choices": lambda: worker.get_topk_logits(data=foreign, k=2),
        "more choices than tokens": lambda: worker.get_topk_logits(data=tiny.grpo_batch(), k=33),
        "answers": lambda: worker.generate(data=tiny.BatchedDataDict(prompts), step=0, stop_ids=[1]),
        "training": lambda: worker.train(late, tiny.grpo_loss()),
        "evaluation": lambda: worker.train(foreign, tiny.grpo_loss(), eval_mode=True),
    }
    for name, call in calls.items():
        with refused("batch"):
            call()
        assert worker_state.differences(before, worker_state.capture(worker)) == [], name
    worker.get_logprobs(data=tiny.grpo_batch())
    return worker.train(tiny.grpo_batch(), tiny.grpo_loss())["update_successful"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_call_refuses_before_it_does_anything(ranks, layout):
    world_size, megatron = LAYOUTS[layout]
    assert ranks(world_size).run(refusals_of_whole_calls, megatron) == [True] * world_size


def values_of_wrong_rows():
    worker = tiny.worker(tiny.policy_config(), role="value")
    with refused("batch", "input_lengths: 65"):
        worker.get_values(data=tiny.grpo_batch(length=65))
    return worker.get_values(data=tiny.grpo_batch())["values"].isfinite().all().item()


def test_a_critic_refuses_rows_beyond_its_positions(ranks):
    assert ranks(1).run(values_of_wrong_rows) == [True]


BROKEN_TEACHERS = {
    "teacher_topk_indices: missing": lambda told: told.pop("teacher_topk_indices"),
    "teacher_topk_logits: shape [8, 12, 4]": lambda told: told.update(
        teacher_topk_logits=told["teacher_topk_logits"][..., 1:]
    ),
    "teacher_topk_indices: 32": lambda told: told["teacher_topk_indices"][0, 4].fill_(32),
    "teacher_logsumexp: -inf": lambda told: told["teacher_logsumexp"][0, 4].fill_(-torch.inf),
}


def losses_of_a_teacher(broken):
    worker = tiny.worker(tiny.policy_config(megatron={"pipeline_model_parallel_size": 2}))
    batch = tiny.grpo_batch()
    for name, value in worker.get_topk_logits(data=batch, k=5).items():
        batch[f"teacher_{name}"] = value
    BROKEN_TEACHERS[broken](batch)
    with refused("batch") as caught:
        worker.train(batch, DistillationLossFn({}))
    return str(caught.value)


@pytest.mark.parametrize("broken", BROKEN_TEACHERS)
def test_what_a_teacher_did_not_say_is_refused_on_every_stage(ranks, broken):
    for message in ranks(2).run(losses_of_a_teacher, broken):
        assert f"\n  {broken}" in message


def phase_after_a_row_above_the_budget(section):
    """A chunk with a row that no microbatch has room for; then the step goes on without it."""
    budgets = {"enabled": True, "train_mb_tokens": 8, "logprob_mb_tokens": 9}
    config = tiny.policy_config(
        max_total_sequence_length=8, generation={"max_new_tokens": 2}, **{section: budgets}
    )
    worker = tiny.worker(config, init_reference_model=False)
    with refused("batch", f"policy.{section}.logprob_mb_tokens: 9"):
        worker.get_logprobs(data=tiny.grpo_batch(length=12))
    worker.begin_train_step(tiny.grpo_loss())
    with refused("batch", f"policy.{section}.train_mb_tokens: 8"):
        worker.train_microbatch(tiny.grpo_batch(length=12))
    phase = worker.train_step.phase.value
    worker.train_microbatch(tiny.grpo_batch(length=8))
    return phase, worker.finish_train_step()["update_successful"]


@pytest.mark.parametrize("section", ["dynamic_batching", "sequence_packing"])
def test_a_row_above_a_token_budget_leaves_the_step_open(ranks, section):
    assert ranks(1).run(phase_after_a_row_above_the_budget, section) == [("open", True)]


# A loss of the user's own that raises on the ranks


def raised_by_a_loss(layout):
    """What `train` raises, and whether the worker trains as if nothing had been."""
    worker = tiny.worker(tiny.policy_config(megatron=layout))
    before = worker_state.capture(worker)
    with pytest.raises(ValueError, match="custom_parts") as caught:
        worker.train(tiny.grpo_batch(), make_loss(ClippedPGLossConfig(type="custom_parts:Leaving")))
    worker.abort_train_step()
    return str(caught.value), worker_state.differences(before, worker_state.capture(worker))


def test_it_is_named_by_its_key_and_its_line(ranks):
    [(text, differences)] = ranks(1).run(raised_by_a_loss, {})
    first, *shown = text.splitlines()
    assert first.startswith("loss_fn.type: custom_parts:Leaving.sums raised SystemExit: a loss that leaves (")
    assert first.rpartition(":")[0].endswith("custom_parts.py")
    assert shown[-1] == "SystemExit: a loss that leaves"
    assert differences == []
