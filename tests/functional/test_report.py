"""The page of real runs of each kind: what a browser makes of it."""

import pytest
from browser import WIDTHS, Shown, chromium
from grpo_run import RECIPE, Run

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs("browser")]

CONFIGS = RECIPE.parent
STEPS = 8


def finished(folder, recipe):
    """The page that a run has written by itself."""
    keys = (
        f"grpo.max_num_steps={STEPS}",
        "grpo.val_period=4",
        f"checkpointing.checkpoint_dir={folder / 'checkpoints'}",
    )
    run = Run(folder, *keys, recipe=CONFIGS / recipe)
    status, output, errors = run.end(240)
    assert status == 0, errors
    assert str(folder / "report.html") in output.replace("\n", "")
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.mark.parametrize(
    ("recipe", "headings", "turns"),
    [
        ("grpo_copy_cpu.yaml", {"Learning", "Stability", "Responses", "Time", "Rollouts", "Recipe"}, 1),
        ("grpo_copy_async_cpu.yaml", {"Asynchronous rollouts", "Time", "Rollouts"}, 1),
        ("grpo_calculator_cpu.yaml", {"Learning", "Rollouts"}, 2),
    ],
    ids=["synchronous", "asynchronous", "several turns"],
)
def test_the_page_of_a_real_run_is_sound(browser, tmp_path, recipe, headings, turns):
    page = finished(tmp_path / "run", recipe)
    for width in WIDTHS:
        shown = Shown(browser, page, width)
        shown.require_sound()
        assert headings <= {*shown.texts("h2")}
        assert f"{STEPS} of {STEPS}" in shown.texts("#summary td")
        assert shown.page.locator(".answer .token").count() > 0
        shown.page.close()
    shown = Shown(browser, page, WIDTHS[0])
    answers = shown.page.evaluate("data.runs[0].steps.flatMap(step => step.answers)")
    assert (
        max(max(answer["tokens"]["turn"], default=0) for answer in answers if answer["tokens"]) >= turns - 1
    )
    with_tokens = [answer for answer in answers if answer["tokens"] and answer["sample_mask"]]
    assert with_tokens
    for answer in with_tokens:
        tokens = answer["tokens"]
        assert sum(tokens["mask"]) == answer["response_tokens"] or answer["sample_mask"] == 0
        if turns == 1:
            assert "".join(tokens["text"])[: len(answer["response"])] == answer["response"]
