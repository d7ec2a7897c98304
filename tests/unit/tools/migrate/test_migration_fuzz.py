"""Any recipe of NeMo RL, with keys of any kind, ends in a file or in a refusal; see tests/migration_fuzz.py."""

import pytest
from migration_fuzz import FOLDER, LEFT_OUT, Case, cases, wrong_with

BASES = sorted(FOLDER.glob("*.yaml"))
FOUND = {
    "a number for megatron_cfg": {"policy.megatron_cfg": 1e300},
    "text for a section that a key moves to": {"env.pool": "text", "env.math.num_workers": 3},
    "no rate of torch": {"policy.dtensor_cfg.enabled": True, "policy.optimizer.kwargs.lr": None},
    "more samples than can be counted": {
        "grpo.num_prompts_per_step": 10**30,
        "policy.train_global_batch_size": 7,
    },
    "a number for a schedule of torch": {"policy.dtensor_cfg.enabled": True, "policy.scheduler": 1e300},
    "a schedule of texts": {"policy.dtensor_cfg.enabled": True, "policy.scheduler": ["a", {"kwargs": 3}]},
    "no policy.generation": {"policy.generation": LEFT_OUT},
}
"""What ended in a traceback or took minutes once."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "examples").symlink_to(FOLDER / "examples")
    return tmp_path


@pytest.mark.parametrize("changes", FOUND.values(), ids=FOUND)
def test_what_a_search_has_found(folder, changes):
    assert wrong_with(Case(FOLDER / "grpo_math_1B_megatron.yaml", changes), folder)[0] == ""


@pytest.mark.parametrize("case", [*cases(5, 31, BASES)])
def test_a_few_recipes(folder, case):
    assert wrong_with(case, folder)[0] == ""


@pytest.mark.exhaustive
def test_more_recipes(folder):
    wrong = {str(case): wrong_with(case, folder)[0] for case in cases(100, 32, BASES)}
    assert not {case: what for case, what in wrong.items() if what}
