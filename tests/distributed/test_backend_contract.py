"""Every backend keeps what the worker promises: Megatron, and a plain torch model that stands for other frameworks."""

from inspect import isfunction, signature

import backend_contract
import pytest
import tiny
from backend_faults import FAULTS
from torch_backend import TorchBackend

CHECKS = [
    name
    for name, check in vars(backend_contract).items()
    if isfunction(check) and "make" in signature(check).parameters
]


def holds(check, backend, folder):
    """Run a check in a rank; it raises where the backend breaks it."""
    given = {"torch": {"backend": TorchBackend}, "megatron": {}}.get(backend, {"backend": backend})

    def make(**options):
        return tiny.worker(tiny.policy_config(), **given, **options)

    getattr(backend_contract, check)(make, folder)


@pytest.mark.smoke(
    "a_split_step_is_the_whole_one-megatron", "an_aborted_or_failed_step_leaves_no_trace-megatron"
)
@pytest.mark.parametrize("backend", ["torch", "megatron"])
@pytest.mark.parametrize("check", CHECKS)
def test_a_backend_keeps_the_contract(ranks, tmp_path, check, backend):
    ranks(1).run(holds, check, backend, tmp_path)


def unnoticed_faults(folder):
    """The faults that no check notices, and the checks that have a fault to notice."""
    unnoticed = []
    for number, (check, method, fault) in enumerate(FAULTS):
        place = folder / str(number)
        place.mkdir()
        try:
            holds(check, type("Faulty", (TorchBackend,), {method: fault}), place)
        except AssertionError:
            continue
        unnoticed.append((number, check, method))
    return unnoticed, {check for check, *_ in FAULTS}


def test_a_backend_that_breaks_the_contract_is_caught(ranks, tmp_path):
    unnoticed, checks = ranks(1).run(unnoticed_faults, tmp_path)[0]
    assert unnoticed == []
    assert checks == set(CHECKS)
