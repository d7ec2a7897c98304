import pytest
from hidden_packages import Doctor


@pytest.fixture
def doctor(tmp_path):
    return Doctor(tmp_path)
