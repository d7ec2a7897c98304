"""Known mistakes are noticed by the checks of the test suite; tests/mutations/known_mistakes.py has them."""

import pytest
from mutations.known_mistakes import MUTATIONS, caught_by, failure

pytestmark = pytest.mark.exhaustive


def test_the_checks_pass_without_a_mutation(ranks):
    checks = {str(check): check for mutation in MUTATIONS for check in mutation.checks}
    assert {name: failure(ranks, check) for name, check in checks.items()} == dict.fromkeys(checks)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_is_caught(ranks, mutation):
    assert caught_by(ranks, mutation) is not None
