import os
import signal
import sys
from pathlib import Path

import pytest

# Before torch is imported. On some CPUs a matrix product by several threads does not give the same bits twice, and a
# backward pass that computes logits again must find those of its forward pass. Ranks have one thread each as well.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell starts what runs in its background with Ctrl-C ignored, which processes inherit; tests of Ctrl-C send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parent))

from thinning import thin_out  # noqa: E402


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    thin_out(items)
