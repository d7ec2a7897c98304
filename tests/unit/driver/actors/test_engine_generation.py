"""The driver's handle over a fake engine in real Ray actors: what it asks, when it refits, whom it starts again."""

import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import ray
import torch
from fake_engine import VOCABULARY, FakeEngine, next_logprobs
from fake_generation import STOP, Weights, engine_of, generation, kill, prompts, until
from processes import left_after
from refusals import refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import digest_of_ids
from nemo_rl_mcore.driver.actors.failures import WorkerError
from nemo_rl_mcore.engine.engine import WrongWeightsError
from nemo_rl_mcore.ops.sampling import sample_keys
from nemo_rl_mcore.rank.refit.sender import RefitSettings

pytestmark = pytest.mark.stage("processes")

# pytest's module names mean nothing to a worker.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr("nemo_rl_mcore.driver.actors.engine_generation._FIRST_BACKOFF_S", 0.1)


def test_a_prompt_that_leaves_no_room_for_a_response_is_refused_as_by_the_training_model(cluster):
    """An engine alone would cut the response short at the longest sequence, and say that it did not finish."""
    with refused("prompt-length", "row 1", 11, 6, 17, "policy.max_total_sequence_length: 16"):
        generation(cluster, Weights()).generate(prompts(10, 11), step=1)
    with pytest.raises(WrongWeightsError, match="update_weights"):
        generation(cluster, Weights()).generate(prompts(10, 10), step=1)


@pytest.mark.parametrize("transport", ["shared_memory", "ray"])
def test_rows_keep_their_order_and_their_noise_and_tell_the_weights_of_each_token(cluster, transport):
    source, asked = Weights(), prompts(3, 5, 1, 4, 2)
    with generation(cluster, source, transport) as engines:
        engines.update_weights(0)
        first = engines.generate(asked, step=1)
        for row, length in enumerate(first["lengths"].tolist()):
            tokens = first["tokens"][row, :length].tolist()
            assert first["finished"][row] == (tokens[-1] in STOP)
            assert {(b - a) % VOCABULARY for a, b in pairwise(tokens)} <= {7}, "of one seed and one prompt"
            assert first["weight_versions"][row].tolist() == [0] * length + [-1] * (6 - length)
        again = engines.generate(asked, step=1)
        assert again["tokens"].tolist() == first["tokens"].tolist()
        assert engines.generate(asked, step=2)["tokens"].tolist() != first["tokens"].tolist()

        source.scale = 2.0
        assert engines.generate(asked, step=1)["logprobs"].tolist() == first["logprobs"].tolist()
        engines.update_weights(1)
        fresh = engines.generate(asked, step=1)
        assert fresh["tokens"].tolist() == first["tokens"].tolist()
        drawn = torch.arange(6) < first["lengths"].unsqueeze(1)
        assert torch.equal(fresh["logprobs"] != first["logprobs"], drawn)
        assert fresh["weight_versions"].tolist() == [
            [1 if version == 0 else -1 for version in row] for row in first["weight_versions"].tolist()
        ]
        assert source.sent == 2
    with generation(cluster, source, transport, engines=1) as one:
        one.update_weights(7)
        assert one.generate(asked, step=1)["tokens"].tolist() == first["tokens"].tolist()


class Noting(FakeEngine):
    """Writes what it drew for each request into a folder, its setting."""

    def __init__(self, folder):
        super().__init__()
        self.path = Path(folder) / f"{os.getpid()}.jsonl"

    async def generate(self, requests, sampling, version=None, ticket=""):
        found = await super().generate(requests, sampling, version, ticket)
        with self.path.open("a") as file:
            for request, response in zip(requests, found, strict=True):
                drawn = {"seed": request.seed, "ids": [*response.tokens, len(request.stop_strings)]}
                file.write(f"{json.dumps(drawn)}\n")
        return found


def test_each_request_has_its_noise_its_stop_strings_and_the_digest_of_what_was_drawn(cluster, tmp_path):
    asked = BatchedDataDict(
        prompts(3, 5, 1, 4), turn_index=torch.tensor([0, 1, 2, 0]), stop_strings=[("a",), (), ("b", "c"), ()]
    )
    with generation(cluster, Weights(), engine=Noting, settings=str(tmp_path)) as engines:
        engines.update_weights(0)
        found = engines.generate(asked, step=1)
    by_engine = [[json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.iterdir()]
    assert [len(lines) for lines in by_engine] == [2, 2]
    drawn = [
        ids[:length] for ids, length in zip(found["tokens"].tolist(), found["lengths"].tolist(), strict=True)
    ]
    keys = sample_keys(3, 1, asked["prompt_index"], asked["sample_index"], asked["turn_index"]).tolist()
    strings = map(len, asked["stop_strings"])
    assert {line["seed"]: line["ids"] for lines in by_engine for line in lines} == {
        key: [*ids, count] for key, ids, count in zip(keys, drawn, strings, strict=True)
    }
    assert found["digests"].tolist() == [digest_of_ids(ids) for ids in drawn]


def test_a_refit_that_broke_off_is_done_again_before_the_next_answer(cluster):
    source, asked = Weights(), prompts(3, 2)
    with generation(cluster, source) as engines:
        engines.update_weights(0)
        source.fail = True
        with pytest.raises(RuntimeError, match="broke off"):
            engines.update_weights(1)
        assert engines.generate(asked, step=1)["weight_versions"].max() == 1


def test_engines_that_share_the_ranks_memory_sleep_and_are_refitted_when_they_wake(cluster):
    source, asked = Weights(), prompts(3, 2)
    with generation(cluster, source, sleeps=True) as engines:
        engines.update_weights(0)
        expected = engines.generate(asked, step=1)["logprobs"].tolist()
        engines.offload()
        engines.offload()
        engines.update_weights(1)
        assert engines.generate(asked, step=1)["logprobs"].tolist() == expected
        assert source.sent == 2
        engines.offload()
        engines.update_weights(1)  # a validation came between: nothing was trained
        assert engines.generate(asked, step=1)["weight_versions"].max() == 1
        assert source.sent == 3


def test_ranks_make_room_before_engines_that_share_their_memory_wake(cluster):
    source, asleep = Weights(), []
    with generation(cluster, source, sleeps=True, offload="grads_optimizer") as engines:
        source.before_waking = lambda: asleep.append([engine.asleep for engine in engines.fleet.live])
        engines.update_weights(0)
        engines.offload()
        engines.update_weights(1)
        assert asleep == [[], [True, True]]  # before there is any, and before they wake
        assert source.sent == 2
    apart = {"colocated": {"enabled": False}}
    with generation(cluster, Weights(), offload="grads_optimizer", keys=apart) as engines:
        engines.update_weights(0)  # nobody is asked to


def test_the_check_is_called_once_when_all_engines_have_weights_and_what_it_raises_ends_the_update(cluster):
    source, found = Weights(), []

    def check(engines):
        found.append([[*rows] for rows in engines.next_logprobs([[3, 4], [5]], 2.0)])
        if len(found) == 1:
            raise ValueError("they differ")

    with generation(cluster, source, check=check) as engines:
        with pytest.raises(ValueError, match="they differ"):
            engines.update_weights(0)
        engines.update_weights(0)
        engines.update_weights(1)
    expected = [next_logprobs(10 * 50 * 1.0, prompt, 2.0).tolist() for prompt in ([3, 4], [5])]
    told = [[[row.tolist() for row in engine] for engine in engines] for engines in found]
    assert told == [[expected, expected]] * 2


class ForgetsToSleep(FakeEngine):
    async def sleep(self):
        raise RuntimeError("no room")


def test_an_engine_that_fails_but_lives_is_not_started_again(cluster):
    with generation(cluster, Weights(), engine=ForgetsToSleep, sleeps=True, max_restarts=1) as engines:
        engines.update_weights(0)
        with pytest.raises(WorkerError, match=r"^fake engine \d .*no room") as caught:
            engines.offload()
        assert (caught.value.group, caught.value.method, caught.value.usable) == ("fake", "sleep", True)
        engines.generate(prompts(3), step=1)


def test_a_lost_engine_starts_anew_alone_as_often_as_the_kind_allows_then_the_run_ends(cluster, capsys):
    source, asked = Weights(), prompts(3, 5, 1)
    with generation(cluster, source, max_restarts=1) as engines:
        engines.update_weights(4)
        other, expected = engine_of(engines, 0), engines.generate(asked, step=4)
        lost = kill(engines, 1)
        assert equal(engines.generate(asked, step=4), expected)
        said = capsys.readouterr().err
        assert re.match(
            r"fake engine 1 .* 0.1 s, 0 .*\(policy.generation.max_restarts\): "
            rf"fake engine 1 \(host .*, pid {lost.process.identity.pid}\) died .*generate \(step 4\)",
            said,
        )
        again = engine_of(engines, 1)
        assert again.version is None
        assert engines.joining
        assert equal(engines.generate(asked, step=4), expected)
        assert (again.version, engine_of(engines, 0), engines.fleet.restarts) == (4, other, 1)
        kill(engines, 1)
        with refused("rank-died", "fake engine 1 ", "generate (step 4)", by=WorkerError) as caught:
            engines.generate(asked, step=4)
        assert (caught.value.group, caught.value.usable, caught.value.rank) == ("fake", False, 1)
        assert "policy.generation.max_restarts: 1 " in caught.value.__notes__[0]


@pytest.mark.parametrize("transport", ["shared_memory", "ray"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_refit_in_which_an_engine_is_lost_is_done_again_with_the_others(cluster, transport, how):
    source, asked = Weights(), prompts(3, 2)
    with generation(cluster, source, transport, max_restarts=1, call_timeout_s=3.0) as engines:
        engines.update_weights(0)
        lost = engine_of(engines, 1)
        source.before_sending = lambda: kill(engines, 1, how)
        engines.update_weights(1)
        assert engines.generate(asked, step=1)["weight_versions"].max() == 1
        again = until(lambda: engines.joining and engine_of(engines, 1))
        assert again is not lost
        assert not left_after(60, [lost.process.identity.pid])
        engines.rejoin()
        assert (again.version, again.joined, engines.joining) == (1, True, False)
        digest = engines.weights_digest
        source.scale = 2.0
        engines.update_weights(2)
        assert {engine.version for engine in engines.fleet.live} == {2}
        assert engines.weights_digest != digest


def test_who_starts_anew_is_given_the_weights_alone(cluster):
    source = Weights()
    with generation(cluster, source, max_restarts=1) as engines:
        engines.update_weights(0)
        begun = counted(engine_of(engines, 0))
        engine_of(engines, 1)
        kill(engines, 1)
        engines.generate(prompts(3, 2), step=1)
        until(lambda: engines.joining)
        engines.rejoin()
        assert counted(engine_of(engines, 0)) == begun, "the other one goes on answering"
        assert source.connected == [[0, 1], [1]]
        engines.update_weights(1)
        assert source.connected == [[0, 1], [1], [0, 1]]
        source.incarnation = 1  # new ranks
        engines.update_weights(2)
        engines.update_weights(3)
        assert source.connected == [[0, 1], [1], [0, 1], [0, 1]]


def test_engines_that_share_the_ranks_memory_start_anew_when_it_is_theirs(cluster):
    source, asked = Weights(), prompts(3, 2)
    with generation(cluster, source, sleeps=True, max_restarts=1) as engines:
        engines.update_weights(0)
        expected = engines.generate(asked, step=1)
        engines.offload()
        kill(engines, 1)
        engines.offload()
        time.sleep(0.5)
        engines.update_weights(0)
        assert equal(engines.generate(asked, step=1), expected)
        assert engines.fleet.restarts == 1
        assert not any(engine.asleep for engine in engines.fleet.live)


def equal(one, other):
    return {key: one[key].tolist() for key in one} == {key: other[key].tolist() for key in other}


def counted(engine):
    """Refits that an engine has begun."""
    return ray.get(engine.process.handle.refits_begun.remote(), timeout=30)


# What goes wrong in an engine after the weights have arrived ends the refit, by the tensors' names


NAMES = [f"weight.{i}" for i in range(12)]
A_BUCKET = 400
"""Bytes; two tensors fill one."""


class Matrices(Weights):
    """Matrices that change with every refit."""

    def connect_engines(self, engines, settings):
        super().connect_engines(engines, RefitSettings(**vars(settings) | {"bucket_bytes": A_BUCKET}))

    def prepare_for_lp_inference(self): ...

    def send_weights(self):
        self.sent += 1
        noise = torch.Generator().manual_seed(self.sent)
        return self._sender.send((name, torch.randn(6, 7, generator=noise)) for name in NAMES)


def one_bit(_old, new):
    new["weight.4"].view(torch.uint8)[5, 9] ^= 16


def swapped(_old, new):
    new["weight.4"], new["weight.9"] = new["weight.9"], new["weight.4"]


FAULTS = {one_bit: ["weight.4"], swapped: ["weight.4", "weight.9"]}
"""More are in tests/distributed/test_embedded_engine.py."""


class FailsAfterReceipt(FakeEngine):
    """Every refit but the first one meets with the next fault once all has arrived."""

    def __init__(self, pause_s=0.0):
        super().__init__(pause_s)
        self._faults, self._old = iter([lambda old, new: None, *FAULTS, lambda old, new: None]), {}

    async def finish_refit(self, version, sent):
        arrived = {name: tensor.clone() for name, tensor in self._tensors.items()}
        next(self._faults)(self._old, self._tensors)
        self._old = arrived
        return await super().finish_refit(version, sent)


def with_faults(cluster, transport, **keys):
    return generation(cluster, Matrices(), transport, keys, engine=FailsAfterReceipt, engines=1)


@pytest.mark.parametrize("transport", ["shared_memory", "ray"])
def test_a_fault_after_receipt_is_named_and_the_engine_goes_on_with_the_next_refit(cluster, transport):
    with with_faults(cluster, transport) as engines:
        engines.update_weights(0)
        for version, (fault, names) in enumerate(FAULTS.items(), start=1):
            with pytest.raises(WorkerError, match=rf"12 .*{len(names)} .*: {', '.join(names)}$") as caught:
                engines.update_weights(version)
            assert (caught.value.method, caught.value.usable) == ("finish_refit", True), fault
        engines.update_weights(version + 1)
        assert engines.generate(prompts(3), step=1)["weight_versions"].max() == version + 1


class OneFails(FakeEngine):
    """Of several engines the one that first makes the folder loses a tensor of version 1."""

    def __init__(self, folder):
        super().__init__()
        self._folder = Path(folder)

    async def finish_refit(self, version, sent):
        if version == 1:
            with suppress(FileExistsError):
                self._folder.mkdir()
                self._tensors["weight.4"] = torch.zeros(6, 7)
        return await super().finish_refit(version, sent)


def test_an_engine_that_does_not_hold_what_was_sent_starts_anew_alone(cluster, tmp_path, capsys):
    settings = str(tmp_path / "failed")
    with generation(cluster, Matrices(), engine=OneFails, settings=settings, max_restarts=1) as engines:
        engines.update_weights(0)
        before = {number: engine_of(engines, number) for number in (0, 1)}
        engines.update_weights(1)
        said = re.match(r"fake engine (\d) .* finish_refit .*weight.4", capsys.readouterr().err)
        failed = int(said[1])
        assert engine_of(engines, 1 - failed) is before[1 - failed]
        assert engines.generate(prompts(3), step=1)["weight_versions"].max() == 1
        assert engine_of(engines, failed) is not before[failed]
        engines.update_weights(2)
        assert [engine.version for engine in engines.fleet.live] == [2, 2]


class HoldsBfloat16(FakeEngine):
    def _write(self, name, tensor):
        super()._write(name, tensor.to(torch.bfloat16))


def test_an_engine_may_hold_another_number_format_if_its_kind_says_so(cluster):
    with generation(cluster, Matrices(), engine=HoldsBfloat16, engines=1, precision="bfloat16") as engines:
        engines.update_weights(0)
    with (
        generation(cluster, Matrices(), engine=HoldsBfloat16, engines=1) as engines,
        pytest.raises(WorkerError, match=r"12 .*12 "),
    ):
        engines.update_weights(0)
