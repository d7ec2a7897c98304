"""What a worker promises whatever backend holds its model; each check asserts on one rank."""

from functools import partial

import tiny
import torch
from safetensors.torch import load_file
from torch.nn.functional import pad

from nemo_rl_mcore.data.batched_data_dict import digests_of_rows
from nemo_rl_mcore.losses import ClippedPGLossFn, NLLLossFn
from nemo_rl_mcore.rank.policy_backend import OnDevice
from nemo_rl_mcore.rank.train_step import TrainStepError

TEMPERATURE = 0.7  # of tiny's generation
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


class InjectedError(RuntimeError):
    """The failure of a loss."""


class FailingLoss(ClippedPGLossFn):
    def sums(self, outputs, data):
        raise InjectedError


def refuses(kind, call, code=None):
    """Say whether a call raises an error of this kind, and of this code where one is given."""
    try:
        call()
    except kind as error:
        return code in (None, getattr(error, "code", None))
    return False


def weights(worker):
    return {name: tensor.clone() for name, tensor in worker.backend.full_tensors()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def close(left, right):
    return left.keys() == right.keys() and all(
        torch.allclose(left[name], right[name], **CLOSE) for name in left
    )


def real(batch, from_column):
    """[B, S], true at real tokens but the first (1), or at positions whose next token is real (0)."""
    return torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None] - (1 - from_column)


def whole_distribution(worker, batch):
    """[B, S, V] log-probabilities by id, as top-k of the whole vocabulary says them."""
    every = worker.get_topk_logits(data=batch, k=tiny.VOCABULARY)
    logprobs = every["topk_logits"] - every["logsumexp"].unsqueeze(-1)
    return torch.zeros_like(logprobs).scatter_(2, every["topk_indices"], logprobs)


def logprobs_are_those_of_the_next_token(make, _folder):
    worker, batch = make(), tiny.grpo_batch(rows=5)
    found = worker.get_logprobs(data=batch)["logprobs"]
    assert (found.dtype, found.device.type) == (torch.float32, "cpu")
    every = whole_distribution(worker, batch)
    assert torch.allclose(every.exp().sum(-1)[real(batch, 0)], torch.ones(()), **CLOSE)
    wanted = pad(every[:, :-1].gather(2, batch["input_ids"][:, 1:, None]).squeeze(2), (1, 0))
    wanted[~real(batch, 1)] = 0.0
    assert (wanted < 0).any()
    assert torch.allclose(found, wanted, **CLOSE)
    assert (found[:, 0] == 0).all()
    assert (found[~real(batch, 1)] == 0).all()
    one_by_one = worker.get_logprobs(data=batch, micro_batch_size=1)["logprobs"]
    assert torch.allclose(found, one_by_one, **CLOSE)
    batch["input_ids"][0, -1] += 65536
    assert refuses(ValueError, lambda: worker.get_logprobs(data=batch))


def the_temperature_divides_the_logits(make, _folder):
    """Every pass of the worker is read at the temperature that it is given, whatever it samples at."""
    batch = tiny.grpo_batch()
    sampled = make().get_topk_logits(data=batch, k=4)["topk_logits"]
    given = make(temperature=1.0)
    plain = given.get_topk_logits(data=batch, k=4)["topk_logits"]
    assert torch.allclose(sampled * TEMPERATURE, plain, **CLOSE)
    assert plain.abs().max() > 0
    every = whole_distribution(given, batch)[:, :-1].gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    read = given.get_logprobs(data=batch)["logprobs"]
    assert torch.allclose(read[:, 1:], every.masked_fill(~real(batch, 1)[:, 1:], 0.0), **CLOSE)
    assert torch.equal(given.get_reference_policy_logprobs(data=batch)["reference_logprobs"], read)
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    (loss,) = given.train(batch, NLLLossFn(), eval_mode=True)["all_mb_metrics"]["loss"]
    assert torch.allclose(torch.tensor(loss), -(read * mask).sum() / mask.sum(), **CLOSE)


def topk_is_the_head_of_the_distribution(make, _folder):
    worker, batch = make(), tiny.grpo_batch()
    best = worker.get_topk_logits(data=batch, k=5)
    logprobs = best["topk_logits"] - best["logsumexp"].unsqueeze(-1)
    every, at = whole_distribution(worker, batch), real(batch, 0)
    assert best["topk_indices"].dtype == torch.int64
    assert torch.allclose(logprobs[at], every.topk(5).values[at], **CLOSE)
    assert torch.allclose(every.gather(2, best["topk_indices"])[at], logprobs[at], **CLOSE)
    mass = logprobs.exp().sum(-1) + best["tail_logmass"].exp()
    assert torch.allclose(mass[at], torch.ones(()), **CLOSE)
    assert all((values[~at] == 0).all() for values in best.values())
    assert refuses(ValueError, lambda: worker.get_topk_logits(data=batch, k=tiny.VOCABULARY + 1))


def what_is_asked_of_trained_tokens_alone_is_0_elsewhere(make, _folder):
    worker, batch = make(), tiny.grpo_batch()
    of_token, before_token = batch["token_mask"] != 0, batch["token_mask"].roll(-1, 1) != 0
    reads = (
        (worker.get_logprobs, {}),
        (worker.get_reference_policy_logprobs, {}),
        (worker.get_topk_logits, {"k": 3}),
    )
    for read, more in reads:
        every, asked = read(data=batch, **more), read(data=batch, trained_only=True, **more)
        for name in every:
            there = of_token if name.endswith("logprobs") else before_token
            assert torch.allclose(asked[name][there], every[name][there], **CLOSE)
            assert (every[name][~there] != 0).any()
            assert (asked[name][~there] == 0).all()
    unmarked = batch.without("token_mask")
    assert refuses(ValueError, lambda: worker.get_logprobs(data=unmarked, trained_only=True))


def the_reference_stays_at_the_start(make, _folder):
    worker, batch = make(), tiny.grpo_batch()
    start = worker.get_logprobs(data=batch)["logprobs"]
    worker.train(batch, tiny.grpo_loss())
    trained = weights(worker)
    assert torch.equal(worker.get_reference_policy_logprobs(data=batch)["reference_logprobs"], start)
    assert same(weights(worker), trained)
    assert not torch.equal(worker.get_logprobs(data=batch)["logprobs"], start)
    without = make(init_reference_model=False)
    assert refuses(ValueError, lambda: without.get_reference_policy_logprobs(data=batch))


def a_step_is_of_the_loss_over_all_valid_tokens(make, _folder):
    worker, batch = make(), tiny.grpo_batch()
    loss_fn = tiny.grpo_loss(entropy_coef=0.0)
    start, logprobs = weights(worker), worker.get_logprobs(data=batch)["logprobs"]
    rows, tokens = (
        batch["sample_mask"].sum(),
        (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:].sum(),
    )
    wanted, _ = loss_fn(logprobs[:, 1:], batch, rows, tokens)
    evaluated = worker.train(batch, loss_fn, eval_mode=True)
    assert same(weights(worker), start)
    result = worker.train(batch, loss_fn)
    for found in (evaluated, result):
        assert torch.allclose(found["global_loss"], wanted.float(), **CLOSE)
        assert found["all_mb_metrics"]["global_valid_toks"] == [float(tokens)]
        assert found["all_mb_metrics"]["global_valid_seqs"] == [float(rows)]
    assert (evaluated["update_successful"], result["update_successful"]) == (False, True)
    assert evaluated["all_mb_metrics"]["lr"] == result["all_mb_metrics"]["lr"]
    assert result["grad_norm"].item() > 0
    assert not same(weights(worker), start)
    trained, by_rows = weights(worker), make()
    by_rows.train(batch, loss_fn, mbs=1)
    assert close(trained, weights(by_rows))
    twice = make().train(tiny.BatchedDataDict.from_batches([batch, batch]), loss_fn, gbs=16)
    assert torch.allclose(twice["grad_norm"], result["grad_norm"], **CLOSE)


def a_step_that_cannot_be_taken_moves_nothing(make, _folder):
    worker, nan, empty = make(), tiny.grpo_batch(), tiny.grpo_batch()
    start = weights(worker)
    nan["advantages"][0] = float("nan")
    empty["sample_mask"] *= 0
    for batch in (nan, empty):
        result = worker.train(batch, tiny.grpo_loss())
        assert not result["update_successful"]
        assert same(weights(worker), start)
    assert refuses(ValueError, lambda: worker.train(tiny.grpo_batch(rows=7), tiny.grpo_loss()))
    assert worker.train(tiny.grpo_batch(), tiny.grpo_loss())["update_successful"]
    trained, clean = weights(worker), make()
    clean.train(tiny.grpo_batch(), tiny.grpo_loss())
    assert same(trained, weights(clean))


def a_split_step_is_the_whole_one(make, _folder):
    loss_fn, batches = tiny.grpo_loss(), [tiny.grpo_batch(seed=seed) for seed in range(2)]
    whole = make()
    results, trained = [whole.train(batch, loss_fn) for batch in batches], weights(whole)
    split = make()
    for seed, (batch, wanted) in enumerate(zip(batches, results, strict=True)):
        split.begin_train_step(loss_fn, step_id=f"step {seed}")
        assert refuses(TrainStepError, lambda: split.begin_train_step(loss_fn))
        split.train_microbatch(batch.slice(0, 3), chunk_id="first")
        assert refuses(TrainStepError, lambda rows=batch: split.train_microbatch(rows, chunk_id="first"))
        split.get_logprobs(data=batch)
        split.get_reference_policy_logprobs(data=batch)
        split.train_microbatch(batch.slice(3, 8), chunk_id="second")
        found = split.finish_train_step()
        assert found.keys() == wanted.keys()
        for name in ("global_loss", "grad_norm"):
            assert torch.allclose(found[name], wanted[name], **CLOSE)
        metrics, of_whole = found["all_mb_metrics"], wanted["all_mb_metrics"]
        assert metrics.keys() == of_whole.keys()
        assert all(
            torch.allclose(torch.tensor(metrics[name]), torch.tensor(of_whole[name]), **CLOSE)
            for name in metrics
        )
        assert torch.equal(split.finish_train_step()["global_loss"], found["global_loss"])
        assert refuses(TrainStepError, lambda at=seed: split.begin_train_step(loss_fn, step_id=f"step {at}"))
    assert close(trained, weights(split))


def an_aborted_or_failed_step_leaves_no_trace(make, folder):
    clean = make()
    clean.train(tiny.grpo_batch(seed=1), tiny.grpo_loss())
    wanted, failing = weights(clean), FailingLoss(tiny.grpo_loss().cfg)
    worker = make()
    start, generator = weights(worker), torch.get_rng_state()
    worker.abort_train_step()
    worker.begin_train_step(tiny.grpo_loss())
    worker.train_microbatch(tiny.grpo_batch(seed=7))
    torch.rand(3)
    assert refuses(TrainStepError, lambda: worker.save_checkpoint(str(folder / "open")), "step-is-open")
    assert not (folder / "open").exists()
    worker.abort_train_step()
    assert same(weights(worker), start)
    assert torch.equal(torch.get_rng_state(), generator)
    worker.begin_train_step(failing)
    assert refuses(InjectedError, lambda: worker.train_microbatch(tiny.grpo_batch(seed=7)))
    assert refuses(TrainStepError, worker.finish_train_step)
    worker.abort_train_step()
    assert refuses(InjectedError, lambda: worker.train(tiny.grpo_batch(seed=7), failing))
    worker.train(tiny.grpo_batch(seed=1), tiny.grpo_loss())
    assert same(weights(worker), wanted)


def a_loaded_checkpoint_goes_on_as_if_nothing_had_been(make, folder):
    worker, loss_fn, other_weights = make(), tiny.grpo_loss(), partial(make, seed=9)
    worker.begin_train_step(loss_fn, step_id="saved")
    worker.train_microbatch(tiny.grpo_batch())
    worker.finish_train_step()
    saved = weights(worker)
    worker.save_checkpoint(str(folder / "saved"))
    for wait in (True, False):
        assert refuses(ValueError, lambda wait=wait: worker.save_checkpoint(str(folder / "saved"), wait))
    worker.save_checkpoint(str(folder / "copied"), wait=False)
    reference = worker.get_reference_policy_logprobs(data=tiny.grpo_batch())["reference_logprobs"]
    wanted = worker.train(tiny.grpo_batch(seed=1), loss_fn)
    after = weights(worker)
    assert worker.checkpoint_written() > 0
    for name, build in (("saved", lambda: worker), ("saved", other_weights), ("copied", other_weights)):
        again = build()
        again.load_checkpoint(str(folder / name))
        assert same(weights(again), saved)
        assert refuses(TrainStepError, lambda one=again: one.begin_train_step(loss_fn, step_id="saved"))
        found = again.train(tiny.grpo_batch(seed=1), loss_fn)
        assert same(weights(again), after)
        assert found["all_mb_metrics"] == wanted["all_mb_metrics"]
        read = again.get_reference_policy_logprobs(data=tiny.grpo_batch())["reference_logprobs"]
        assert torch.equal(read, reference)
    other = make(seed=9, trained=False)
    assert not same(weights(other), saved)
    other.load_checkpoint(str(folder / "saved"), weights_only=True)
    assert same(weights(other), saved)
    assert refuses(ValueError, lambda: other.load_checkpoint(str(folder / "nowhere"), weights_only=True))


def prompts(rows=4):
    batch = tiny.grpo_batch(rows=rows)
    return tiny.BatchedDataDict(
        input_ids=batch["input_ids"][:, :5],
        input_lengths=torch.tensor([5, 3, 5, 1])[:rows],
        prompt_index=torch.arange(rows),
        sample_index=torch.arange(rows) % 2,
    )


def answers_are_drawn_from_the_policy(make, _folder):
    worker, asked = make(), prompts()
    found = worker.generate(data=asked, step=1, stop_ids=[])
    assert (found["lengths"] == 4).all()
    assert not found["finished"].any()
    assert torch.equal(found["digests"], digests_of_rows(found["tokens"], found["lengths"]))
    for row, length in enumerate(asked["input_lengths"].tolist()):
        ids = torch.cat([asked["input_ids"][row, :length], found["tokens"][row]])[None]
        whole = tiny.BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([length + 4]))
        logprobs = worker.get_logprobs(data=whole)["logprobs"][0, length:]
        assert torch.allclose(found["logprobs"][row], logprobs, **CLOSE)
        alone = asked.slice(row, row + 1)
        assert torch.equal(
            worker.generate(data=alone, step=1, stop_ids=[])["tokens"][0], found["tokens"][row]
        )
        likeliest = worker.generate(data=alone, step=1, stop_ids=[], greedy=True)["tokens"][0, 0]
        best = worker.get_topk_logits(data=whole, k=1)["topk_indices"][0, length - 1, 0]
        assert likeliest == best
    other = worker.generate(data=asked, step=2, stop_ids=[])
    assert not torch.equal(other["tokens"], found["tokens"])
    stop = found["tokens"][0, 1].item()
    stopped = worker.generate(data=asked, step=1, stop_ids=[stop])
    for row, tokens in enumerate(found["tokens"].tolist()):
        length = tokens.index(stop) + 1 if stop in tokens else 4
        assert stopped["lengths"][row] == length
        assert stopped["finished"][row] == (stop in tokens)
        assert stopped["tokens"][row].tolist() == tokens[:length] + [0] * (4 - length)
        assert (stopped["logprobs"][row, length:] == 0).all()
    asked["input_lengths"][0] = 0
    assert refuses(ValueError, lambda: worker.generate(data=asked, step=1, stop_ids=[]))


def an_export_holds_the_present_weights(make, folder):
    worker = make()
    start = weights(worker)
    worker.train(tiny.grpo_batch(), tiny.grpo_loss())
    worker.export_hf(str(folder / "exported"))
    found = {}
    for path in (folder / "exported").glob("*.safetensors"):
        found |= load_file(path)
    assert same(found, weights(worker))
    assert not same(found, start)
    announced = {name: (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in found.items()}
    assert worker.prepare_refit_info() == announced
    assert refuses(ValueError, lambda: worker.export_hf(str(folder / "exported")))


def a_model_without_optimizer_reads_and_is_not_trained(make, folder):
    batch, asked = tiny.grpo_batch(), {"data": prompts(), "step": 3, "stop_ids": [1]}
    trained, worker = make(), make(trained=False)
    assert same(weights(worker), weights(trained))
    for call in (
        lambda one: one.get_logprobs(data=batch),
        lambda one: one.get_topk_logits(data=batch, k=5),
        lambda one: one.generate(**asked),
    ):
        assert same(call(worker), call(trained))
    assert refuses(ValueError, lambda: worker.train(batch, tiny.grpo_loss()))
    assert refuses(ValueError, lambda: worker.begin_train_step(tiny.grpo_loss()))
    assert refuses(ValueError, lambda: worker.save_checkpoint(str(folder / "frozen")))
    assert refuses(ValueError, worker.send_weights)


def what_leaves_the_device_comes_back_as_it_was(make, _folder):
    batch, found = tiny.grpo_batch(seed=9), []
    for moves in (False, True):
        worker = make()
        for step in range(3):
            worker.train(tiny.grpo_batch(seed=step), tiny.grpo_loss())
            for what in (OnDevice.NOTHING, OnDevice.WEIGHTS) if moves else ():
                worker.backend.keep_on_device(what)
            logprobs = worker.get_logprobs(data=batch)["logprobs"]
            if moves:
                worker.backend.keep_on_device(OnDevice.EVERYTHING)
        found.append((logprobs, weights(worker)))
    (plain, trained), (read, moved) = found
    assert torch.equal(plain, read)
    assert same(trained, moved)


def values_are_of_states_before_real_tokens(make, _folder):
    worker, batch = make(role="value"), tiny.grpo_batch()
    found = worker.get_values(data=batch)["values"]
    assert (found.shape, found.dtype) == (batch["input_ids"].shape, torch.float32)
    assert (found[:, 0] == 0).all()
    assert (found[~real(batch, 1)] == 0).all()
    assert refuses(ValueError, lambda: make().get_values(data=batch))
