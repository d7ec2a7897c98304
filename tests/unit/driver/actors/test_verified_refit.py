"""What goes wrong in an engine after the weights have arrived ends the refit, by the tensors' names."""

import re
import sys
from contextlib import suppress
from pathlib import Path

import fake_generation
import pytest
import ray
import torch
from fake_engine import FakeEngine
from fake_generation import engine_of, generation, prompts

from nemo_rl_mcore.driver.actors.failures import WorkerError
from nemo_rl_mcore.rank.refit.sender import RefitSettings

pytestmark = pytest.mark.stage("processes")

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

NAMES = [f"weight.{i}" for i in range(12)]
A_BUCKET = 400
"""Bytes; two tensors fill one."""


class Weights(fake_generation.Weights):
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
    return generation(cluster, Weights(), transport, keys, engine=FailsAfterReceipt, engines=1)


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
    with generation(cluster, Weights(), engine=OneFails, settings=settings, max_restarts=1) as engines:
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


def test_without_the_check_each_of_these_faults_is_acknowledged(cluster):
    with with_faults(cluster, "shared_memory", verify_refit=False) as engines:
        for version in range(len(FAULTS) + 1):
            engines.update_weights(version)
            assert engines.generate(prompts(3), step=1)["weight_versions"].max() == version


class HoldsBfloat16(FakeEngine):
    def _write(self, name, tensor):
        super()._write(name, tensor.to(torch.bfloat16))


def test_an_engine_may_hold_another_number_format_if_its_kind_says_so(cluster):
    with generation(cluster, Weights(), engine=HoldsBfloat16, engines=1, precision="bfloat16") as engines:
        engines.update_weights(0)
    with (
        generation(cluster, Weights(), engine=HoldsBfloat16, engines=1) as engines,
        pytest.raises(WorkerError, match=r"12 .*12 "),
    ):
        engines.update_weights(0)
