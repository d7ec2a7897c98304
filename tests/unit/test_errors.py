import pickle

import pytest
from ray.exceptions import RayTaskError
from refusals import assert_refused

from nemo_rl_mcore.errors import CustomCodeError, RefusedError, RunStoppedError, code_of


@pytest.mark.parametrize("kind", [RefusedError, RunStoppedError, CustomCodeError])
def test_a_code_travels_with_its_error(kind):
    error = kind("logger.log_dir: 7 rows", code="log-rows")
    by_ray = RayTaskError("train", str(error), error, "rank", 1, "127.0.0.1").as_instanceof_cause()
    for arrived in (pickle.loads(pickle.dumps(error)), by_ray, by_ray.cause):
        assert isinstance(arrived, kind)
        assert code_of(arrived) == "log-rows"
        assert_refused(arrived, "log-rows", "logger.log_dir", 7)
    assert str(error) == "logger.log_dir: 7 rows"


def test_a_refusal_is_a_value_error_and_its_class_needs_no_more_than_a_message():
    assert issubclass(RefusedError, ValueError)
    assert code_of(RefusedError("words")) == code_of(ValueError("words")) == code_of(None) == ""
