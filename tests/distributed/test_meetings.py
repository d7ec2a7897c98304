"""Every two features meet: the combination is refused by name, or its run equals its plain sibling's.

`meetings.py` holds the matrix, and runs every three features by hand.
"""

from contextlib import contextmanager
from unittest.mock import patch

import meeting_cases
import meeting_ranks
import meetings
import pytest
from meeting_recipes import ALGORITHMS, EXAMPLES, FACTORS, LAYOUTS, MATHEMATICS, name_of, plain_sibling

from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.driver.algorithms import run_checkpoints as run_start

PLAIN = {name: values[0] for name, values in FACTORS.items()}


@pytest.fixture(scope="module")
def matrix(ranks, tmp_path_factory):
    matrix = meetings.Matrix(ranks, tmp_path_factory.mktemp("meetings"))
    yield matrix
    matrix.leave()


@pytest.mark.smoke
def test_every_algorithm_and_variant_of_the_package_is_in_the_matrix():
    shipped = {algorithm.shipped.algorithm for algorithm in ALGORITHMS.values()}
    assert shipped == RUN_CONFIGS.keys()
    variants = {path.stem.removesuffix("_cpu") for path in (EXAMPLES / "recipes" / "variants").iterdir()}
    assert variants < ALGORITHMS.keys()


@pytest.mark.parametrize("strength", [2, 3])
def test_the_selection_holds_every_meeting(strength):
    chosen = meeting_cases.selection(strength)
    met = set().union(
        *(meeting_cases.met_by(case, strength) for case in chosen if not meeting_cases.refusal_of(case))
    )
    refused = [
        values for values in meeting_cases.meetings(strength) if meeting_cases.refusal_of(dict(values))
    ]
    assert met.isdisjoint(refused)
    assert met | set(refused) == set(meeting_cases.meetings(strength))
    for values in refused:
        assert any(set(values) <= case.items() for case in chosen)


@pytest.mark.smoke
def test_the_plain_sibling_has_the_same_mathematics_and_nothing_else():
    for case in meeting_cases.selection(2):
        plain = plain_sibling(case)
        assert LAYOUTS[plain["layout"]][0] == 1
        changed = {name for name, value in plain.items() if value != PLAIN[name]}
        assert changed <= {*MATHEMATICS, "layout"}
        assert plain_sibling(plain) == plain


@pytest.mark.each_value
@pytest.mark.parametrize("case", meeting_cases.selection(2), ids=name_of)
def test_features_that_meet_are_refused_by_name_or_equal_the_plain_sibling(matrix, case):
    verdict = matrix.verdict(case)
    assert not verdict.failures
    assert verdict.refused == (meeting_cases.refusal_of(case) is not None or case["state"] == "foreign")


# The matrix notices the mistakes that it is there for.


@contextmanager
def mistake(ranks, name, world_size):
    """A mistake of `meeting_ranks` on every rank and on the driver."""
    pool = ranks(world_size)
    pool.run(meeting_ranks.make_mistake, name, stay=True)
    try:
        with meeting_ranks.MISTAKES[name]():
            yield
    finally:
        pool.run(meeting_ranks.mend, stay=True)


PAIRS = {"algorithm": "dpo offline", "kl": True}
AHEAD = {"asynchrony": "ahead", "correction": True}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "own", "noticed"),
    [
        ("rows_sorted_singly", PAIRS | {"batching": "dynamic"}, "train/loss"),
        # A packed row holds half a pair more often than not, which the loss itself refuses.
        ("rows_sorted_singly", PAIRS | {"batching": "packed"}, "invalid for input of size"),
        ("rows_sorted_singly", PAIRS | {"batching": "dynamic", "layout": "dp2"}, "train/loss"),
        ("schedule_counts_rows", PAIRS, "train/lr"),
        ("correction_dropped_ahead", AHEAD, "train/grad_norm"),
        (
            "correction_dropped_ahead",
            AHEAD | {"asynchrony": "as completed", "layout": "dp2"},
            "train/grad_norm",
        ),
        ("previous_logprobs_of_those_that_drew", AHEAD, "train/loss"),
        ("noise_of_the_open_step", AHEAD, "train/loss"),
        ("newest_groups_first", AHEAD, "the groups"),
        ("first_group_trains_again", AHEAD, "groups train twice"),
    ],
)
def test_a_mistake_is_noticed(ranks, matrix, name, own, noticed):
    case = PLAIN | own
    assert not matrix.verdict(case).failures  # and the plain sibling is made without the mistake
    with mistake(ranks, name, LAYOUTS[case["layout"]][0]):
        failures = matrix.verdict(case).failures
    assert any(noticed in failure for failure in failures), failures


@pytest.mark.exhaustive
def test_a_foreign_checkpoint_that_is_taken_is_noticed(matrix):
    with patch.object(run_start, "cannot_resume", lambda *_: None):
        failures = matrix.verdict(PLAIN | {"state": "foreign"}).failures
    assert failures == ["grpo goes on from a checkpoint of sft"]
