"""Every backend keeps what the worker promises: Megatron, and a plain torch model that stands for other frameworks."""

import pytest

CHECKS = (
    "logprobs_are_those_of_the_next_token",
    "the_temperature_divides_the_logits",
    "topk_is_the_head_of_the_distribution",
    "what_is_asked_of_trained_tokens_alone_is_0_elsewhere",
    "the_reference_stays_at_the_start",
    "a_step_is_of_the_loss_over_all_valid_tokens",
    "a_step_that_cannot_be_taken_moves_nothing",
    "a_split_step_is_the_whole_one",
    "an_aborted_or_failed_step_leaves_no_trace",
    "a_loaded_checkpoint_goes_on_as_if_nothing_had_been",
    "answers_are_drawn_from_the_policy",
    "an_export_holds_the_present_weights",
    "a_model_without_optimizer_reads_and_is_not_trained",
    "what_leaves_the_device_comes_back_as_it_was",
    "values_are_of_states_before_real_tokens",
)


def holds(check, backend, folder):
    """Run a check in a rank; it raises where the backend breaks it."""
    import backend_contract
    import tiny
    from torch_backend import TorchBackend

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


@pytest.mark.smoke
def test_every_check_of_the_contract_is_run():
    from pathlib import Path

    text = Path(__file__).with_name("backend_contract.py").read_text("utf-8")
    checks = (line for line in text.splitlines() if line.startswith("def ") and "(make, " in line)
    assert tuple(line[4:].partition("(make")[0] for line in checks) == CHECKS


def unnoticed_faults(folder):
    """The faults that no check notices, and the checks that have a fault to notice."""
    from backend_faults import FAULTS
    from torch_backend import TorchBackend

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
