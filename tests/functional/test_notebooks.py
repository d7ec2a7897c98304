"""The notebook of the examples, cell by cell in a kernel that is interrupted once, and as it is kept in git."""

import json
import os

import pytest
from doc_pages import REPO

NOTEBOOK = REPO / "examples/train_in_a_notebook.ipynb"
CELLS = {cell["id"]: cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]}
FIGURE = "application/vnd.plotly.v1+json"


@pytest.fixture
def kernel(tmp_path):
    from jupyter_client.manager import start_new_kernel

    of_its_own = {name: str(tmp_path / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR")}
    manager, client = start_new_kernel(cwd=str(tmp_path), env=os.environ | of_its_own)
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


class Kernel:
    """Runs cells, each within three minutes."""

    def __init__(self, manager, client):
        self.interrupt = manager.interrupt_kernel
        self._client = client

    def run(self, code, heard=None, *, fails=False):
        """Run code, and return its outputs; heard: is told each as it comes."""
        outputs = []

        def keep(message):
            if message["msg_type"] in ("stream", "display_data", "execute_result", "error"):
                outputs.append({"type": message["msg_type"], **message["content"]})
                if heard is not None:
                    heard(outputs[-1])

        reply = self._client.execute_interactive(code, timeout=180, output_hook=keep)["content"]
        assert reply["status"] == ("error" if fails else "ok"), outputs
        return outputs


def printed(outputs):
    return "".join(one["text"] for one in outputs if one["type"] == "stream" and one["name"] == "stdout")


def test_the_notebook_is_kept_without_outputs():
    assert [cell for cell in CELLS.values() if cell["cell_type"] == "code"]
    for cell in CELLS.values():
        assert not cell.get("outputs"), cell["id"]
        assert cell.get("execution_count") is None, cell["id"]
        assert not cell["metadata"], cell["id"]


@pytest.mark.exhaustive
@pytest.mark.needs("notebook")
def test_the_notebook_trains_and_plots_although_it_is_interrupted(kernel, tmp_path):
    steps = 50
    code = {name: "".join(cell["source"]) for name, cell in CELLS.items() if cell["cell_type"] == "code"}
    for name in ("data", "functions", "run"):
        outputs = kernel.run(code[name])
    assert "samples" in outputs[-1]["data"]["text/plain"]

    def interrupt_after_some(output):
        if "5: " in output.get("text", ""):
            kernel.interrupt()

    outputs = kernel.run(code["steps"], interrupt_after_some, fails=True)
    assert "\x1b" not in printed(outputs)
    assert [one["ename"] for one in outputs if one["type"] == "error"] == ["KeyboardInterrupt"]
    [saved] = (tmp_path / "results/notebook/checkpoints").glob("step_*")
    done = int(saved.name.removeprefix("step_"))
    assert 4 < done < steps
    assert (
        kernel.run("import psutil; psutil.Process().children(recursive=True)")[-1]["data"]["text/plain"]
        == "[]"
    )
    told = printed(kernel.run(code["steps"]))
    assert f"{done + 1}: " in told
    assert f" {done}: " not in told
    [figure] = kernel.run(code["plot"])
    lines = figure["data"][FIGURE]["data"]
    assert [line["name"] for line in lines] == ["near", "ended"]
    assert "83>" in printed(kernel.run(code["generate"]))
    history = [
        json.loads(line) for line in (tmp_path / "results/notebook/metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in history] == [*range(1, steps + 1)]
    assert history[-1]["rewards/near_mean"] > 3 * history[0]["rewards/near_mean"]
