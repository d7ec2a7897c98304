"""The page as a reader has it."""

import math

import pytest
from browser import WIDTHS, Shown, chromium
from run_folder import HOSTILE, rows, write_events, write_results, write_run

from nemo_rl_mcore.tools.report import read_run, write_page

pytestmark = [pytest.mark.needs("browser"), pytest.mark.stage("docs")]
TOKENS = {
    "text": ["4", "2", "=", "\n", "7"],
    "turn": [1, 1, 0, 0, 2],
    "mask": [1, 1, 0, 0, 1],
    "generation_logprobs": [-0.5, -4.0, None, None, -0.1],
    "prev_logprobs": [-0.5, -3.5, None, None, -0.1],
    "advantages": [1.0, 1.0, None, None, -2.0],
}
TURNS = [
    {"role": "assistant", "content": "42", "reward": 0.25},
    {"role": "tool", "content": "=\n"},
    {"role": "assistant", "content": "7", "reward": 0.5},
]


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of two runs, with all that a page can have; texts that try to be more than text."""
    folder = tmp_path_factory.mktemp("runs")
    columns = {
        "train/entropy": lambda step: 3.0 if step < 20 else 0.01,
        "async/trainer_idle": 0.1,
        "async/engine_idle": 0.6,
        "a/b": 1.0,
    }
    for name in ("one", "other"):
        run = write_run(
            folder / name,
            rows(30, **columns),
            steps=30 + len(name),
            prompt=HOSTILE,
            response="42=\n7",
            tokens=TOKENS,
            turns=TURNS,
            rewards={"right": 1.0, "brief": -0.5},
        )
        write_events(run)
        write_results(run / "eval")
    return write_page([read_run(folder / name) for name in ("one", "other")], folder / "page.html")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_sound_and_whole(browser, page, width):
    shown = Shown(browser, page, width)
    shown.require_sound()
    assert shown.texts("h1") == ["one and other"]
    assert shown.texts("h2") == [
        *(
            "What to look at",
            "Summary",
            "Evaluations",
            "Learning",
            "Stability",
            "Asynchronous rollouts",
            "Speed",
        ),
        *("Other metrics", "Time", "Rollouts", "Faults survived", "Recipe"),
    ]
    warnings = shown.texts(".finding.warning")
    assert sum("Entropy has collapsed, from 3 to 0.01" in text for text in warnings) == 2
    assert sum("30 of 33 steps" in text for text in warnings) == 1
    found = "document.getElementById(link.hash.slice(1)) && link.hash"
    links = shown.page.evaluate(f"[...document.querySelectorAll('.finding a')].map(link => {found})")
    assert {*links} == {"#train/entropy"}
    assert shown.texts("#evaluations td")[:5] == ["digits", "4", "8", "0.5 ± 0.1", "1"]
    assert [row for row in shown.texts("#recipe tr") if "max_num" in row] == ["grpo.max_num_steps\t33\t35"]
    assert len(shown.texts("#faults-survived tr")) == 2 * 4
    assert HOSTILE in shown.texts(".answer .turn pre")[0]
    assert shown.page.locator("img").count() == 0


def test_tokens_are_coloured_by_what_is_chosen_and_turns_stand_apart(browser, page):
    shown = Shown(browser, page, 1280)
    assert shown.texts(".answer .turn > b") == [
        *("prompt", "answer 1, reward 0.25", "observation", "answer 2, reward 0.5", "right answer")
    ]
    colours = "[...document.querySelectorAll('.token')].map(token => getComputedStyle(token).backgroundColor)"
    by_logprob = shown.page.evaluate(colours)
    assert by_logprob[1] == "rgba(214, 69, 65, 0.5)"  # -4 of -6 nats
    assert by_logprob[2] == "rgba(0, 0, 0, 0)"
    shown.choose("token colour", "advantage")
    by_advantage = shown.page.evaluate(colours)
    assert [by_advantage[0], by_advantage[4]] == ["rgba(42, 157, 111, 0.376)", "rgba(214, 69, 65, 0.75)"]
    shown.choose("token colour", "training minus engine")
    assert shown.page.evaluate(colours)[1] == "rgba(47, 111, 219, 0.75)"
    assert "not trained on" in shown.page.locator(".token").nth(2).get_attribute("title")
    shown.page.locator(".token").nth(1).click()
    assert shown.texts(".told")[0].startswith(
        'token 2: "2" · log-probability, engine: -4 · log-probability, training: -3.5'
    )
    assert shown.said == []


def test_answers_are_found_sorted_and_chosen(browser, page):
    shown = Shown(browser, page, 400)
    shown.choose("run", "other")
    shown.choose("step", "training, step 1")
    shown.choose("order", "highest reward first")
    assert [text.split(" ")[0] for text in shown.texts(".list button")] == ["0.5", "0"]
    shown.page.locator(".list button").nth(1).click()
    assert shown.texts(".answer > p")[0].startswith("reward 0 · reward right 1 · reward brief -0.5 · ")
    shown.page.get_by_label("text").fill("no such text")
    assert shown.texts(".list button") == []
    assert shown.texts(".answer") == ["No answer contains this text."]
    shown.require_sound()


def test_a_folder_with_hardly_anything_has_a_page(browser, tmp_path):
    write_results(tmp_path)
    shown = Shown(browser, write_page([read_run(tmp_path)], tmp_path / "report.html"), 400)
    shown.require_sound()
    assert shown.texts("h2") == ["What to look at", "Evaluations"]


def test_a_long_row_of_an_episode_is_shown_as_far_as_it_is_kept(browser, tmp_path):
    """Its first turn is the episode's second; the turns of a row are those of its own tokens."""
    long = TOKENS | {"turn": [2, 2, 0, 0, 3]}
    long = {name: [*column, *column[-1:] * 20_000] for name, column in long.items()}
    write_run(tmp_path, rows(1), answers=1, tokens=long, turns=TURNS)
    shown = Shown(browser, write_page([read_run(tmp_path)], tmp_path / "report.html"), 400)
    shown.require_sound()
    assert shown.page.locator(".token").count() == 2000
    assert shown.texts(".answer .turn > b")[1:5] == [
        *("answer 2, reward 0.25", "observation", "answer 3, reward 0.5", "18005 more tokens")
    ]


def figures(browser, folder, metrics, expression):
    shown = Shown(browser, write_page([read_run(write_run(folder, metrics))], folder / "report.html"), 400)
    shown.require_sound()
    return shown.page.evaluate(expression)


WATERFALL = "(({data: [bar]}) => [bar.y, bar.x, bar.base])(waterfall(phasesOf(data.runs[0])))"


def test_the_waterfall_is_the_median_step_and_adds_up(browser, tmp_path):
    metrics = rows(5, **{"timing/train": lambda step: 0.25 if step < 5 else 0.4})
    assert figures(browser, tmp_path / "one", metrics, WATERFALL) == [
        *(["generation", "training", "the rest"], [0.5, 0.25, 0.25], [0, 0.5, 0.75])
    ]
    beside = rows(5, **{"async/trainer_idle": 0.5})
    names = figures(browser, tmp_path / "beside", beside, WATERFALL)[0]
    assert names == ["waiting for answers", "training", "the rest"]
    unknown = dict.fromkeys(("timing/total", "timing/train"), lambda step: math.nan if step == 2 else 1.0)
    metrics = rows(5, **unknown | {"timing/generation": 0.0})
    assert figures(browser, tmp_path / "unknown", metrics, WATERFALL)[:2] == [["training"], [1]]


def test_curves_have_gaps_where_values_are_not_finite_and_a_constant_its_own_axis(browser, tmp_path):
    columns = {"train/loss": lambda step: math.inf if step == 2 else 1 / 3, "train/lr": 0.001, "a/b": 1.0}
    lines, layout, others = figures(
        browser,
        tmp_path,
        rows(30, **columns),
        """[overSteps(["train/loss"]).data[0].y.slice(0, 3), overSteps(["train/lr"]).layout.yaxis.range,
            [...document.querySelectorAll("#other-metrics option")].map((one) => one.value)]""",
    )
    assert lines == [0.333333, None, 0.333333]
    assert layout == [0.0005, 0.0015]
    assert others == ["a/b", "timing/generation", "timing/train"]
