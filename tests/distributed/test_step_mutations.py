"""The checks of the train step notice its known mistakes; `tests/mutations` has the table, and what needs two ranks."""

import pytest
from mutations.train_step_mutations import MUTATIONS, caught_by, failure

ON_ONE_RANK = [mutation for mutation in MUTATIONS if all(check.ranks == 1 for check in mutation.checks)]


@pytest.mark.exhaustive
def test_the_checks_pass_without_a_mutation(ranks):
    checks = {str(check): check for mutation in ON_ONE_RANK for check in mutation.checks}
    assert {name: failure(ranks, check) for name, check in checks.items()} == dict.fromkeys(checks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mutation", ON_ONE_RANK, ids=lambda mutation: mutation.name)
def test_a_mutation_is_caught(ranks, mutation):
    assert caught_by(ranks, mutation) is not None
