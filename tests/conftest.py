import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported. On some CPUs a matrix product by several threads does not give the same bits twice, and a
# backward pass that computes logits again must find those of its forward pass. Ranks have one thread each as well.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell starts what runs in its background with Ctrl-C ignored, which processes inherit; tests of Ctrl-C send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run; and on a machine that does other things too, one may take long.
settings.register_profile(
    "any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

sys.path.insert(0, str(Path(__file__).parent))

from counting import Counts  # noqa: E402
from extras import lacking  # noqa: E402
from thinning import has_stages, one_case_in, thin_out  # noqa: E402


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    thin_out(items, stages=has_stages(config))


def pytest_collection_finish() -> None:
    """Keep the heap of all collected tests out of full passes of the collector, of which each run begins with one."""
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # a run's end would bring the heap back


class _OneCaseIn:
    """Keeps one in so many cases of each test, of those that the marks have left."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Iterator[object]:
        others = yield
        kept = one_case_in(config.option.one_in, items)
        left_out = {*map(id, items)} - {*map(id, kept)}
        config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
        items[:] = kept
        return others


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="run one in N cases of each test, the first among them",
    )
    parser.addoption(
        "--skipped", type=Path, metavar="FILE", help="write the ids of skipped tests there, one a line"
    )
    parser.addoption(
        "--write-messages",
        action="store_true",
        help="rewrite how recipes are refused: unit/recipe/messages.yaml",
    )
    parser.addoption(
        "--counts", type=Path, metavar="FILE", help="fail where the tests cost more than this says"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_OneCaseIn())
    if hasattr(config, "workerinput"):  # a process of pytest-xdist, which reports to the one that started it
        return
    skipped: Path | None = config.getoption("--skipped")
    counts: Path | None = config.getoption("--counts")
    if skipped:
        config.pluginmanager.register(_Skipped(skipped))
    if counts:
        config.pluginmanager.register(Counts(counts))


class _Skipped:
    """Keeps the ids of skipped tests in a file, which pytest takes as arguments: `pytest @FILE`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            with self._file.open("a") as ids:
                ids.write(f"{report.nodeid}\n")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if source := lacking(name):
                pytest.skip(f"needs {source}")


@pytest.fixture
def heard_hangups() -> Iterator[None]:
    """SIGHUP ends this process and those that it starts, also where nohup has it ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
