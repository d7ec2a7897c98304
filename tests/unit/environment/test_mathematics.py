"""Which answers of a data set are scored against, and that the others are refused before Ray or a rank starts."""

import logging

import pytest
from chat_tokenizer import VOCABULARY, save_chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_holds, brief, briefs
from rows_of_files import recipe_over, write_rows

from nemo_rl_mcore.config import ConfigError, EnvConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.driver import run as launch
from nemo_rl_mcore.driver.parts import open_parts
from nemo_rl_mcore.driver.run_folder import recipe_text
from nemo_rl_mcore.driver.signals import EXIT_FAILED
from nemo_rl_mcore.environment.mathematics import MathEnvironment
from nemo_rl_mcore.environment.registry import make_environment
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.check.given_weights import load_recipe_of

pytestmark = pytest.mark.needs("math")
GOLD = {"gold": {"after": "####"}}
SAMPLED = {"num_prompts_per_step": 16, "num_generations_per_prompt": 16, "max_num_steps": 1}
GIVEN = {"max_num_steps": 1}
VALIDATED = {"val_at_end": True, "max_val_samples": 2}


def solutions(count, wrong=()):
    """Rows of which some state no answer; every letter is one of the character tokenizer."""
    rows = ({"input": f"{number}>", "output": f"####{number}"} for number in range(count))
    return [row | {"output": str(number)} if number in wrong else row for number, row in enumerate(rows)]


@pytest.fixture
def recipe(tmp_path):
    """A recipe of any algorithm over rows to train on and rows to validate with, scored by env.math."""

    def make(name, section, rows, held_out=None, *, math=GOLD, **changes):
        validation = write_rows(tmp_path / "validation.jsonl", rows[:4] if held_out is None else held_out)
        own = {"env": {"math": math}, "logger": {"log_dir": str(tmp_path / "results")}}
        data = {"validation": {"data_path": validation}}
        return recipe_over(tmp_path, rows, name, section, data=data, **own, **changes)

    return make


def told(config):
    """What the parts of a run are refused for, as they are opened."""
    try:
        open_parts(config)
    except RunStoppedError as error:
        return [str(problem) for problem in error.__cause__.problems]
    return []


TEACHER = {"teacher": {"init_checkpoint": "elsewhere"}}
ALGORITHMS = [
    ("grpo", SAMPLED, {}, True),
    ("ppo", SAMPLED | {"adv_estimator": {"name": "gae"}}, {"value": {"optimizer": {"lr": 1e-3}}}, True),
    ("distillation", SAMPLED | {"topk_logits_k": 8}, TEACHER, True),
    (
        "distillation",
        SAMPLED | {"topk_logits_k": 8, "on_policy": False, "num_generations_per_prompt": 1},
        TEACHER,
        False,
    ),
    ("dpo", GIVEN | {"num_generations_per_prompt": 2}, {}, True),
    ("dpo", GIVEN, {}, False),
    ("sft", GIVEN, {}, False),
]
IDS = ["grpo", "ppo", "on-policy", "off-policy", "online-dpo", "dpo", "sft"]


@pytest.mark.parametrize(("name", "section", "changes", "trains_on_scores"), ALGORITHMS, ids=IDS)
def test_an_algorithm_has_the_answers_checked_that_it_scores_against(
    recipe, tmp_path, name, section, changes, trains_on_scores
):
    rows = solutions(300, wrong={20, 30})
    rows = [row | {"prompt": row["input"], "chosen": row["output"], "rejected": "0"} for row in rows]
    sizes = {"train_global_batch_size": 16, "train_micro_batch_size": 8, "logprob_batch_size": 8}
    small = {"policy": {"max_total_sequence_length": 16, **sizes}}
    held_out = rows[19:60]
    silent = recipe(name, section | {"val_at_end": False}, rows, held_out, **small, **changes)
    path = f"{tmp_path}/rows.jsonl"
    assert [text.partition(": the answer")[0] for text in told(silent)] == [
        f"env.math.gold: {path}:{line}" for line in (21, 31) if trains_on_scores
    ]
    validating = told(recipe(name, section | VALIDATED, rows, held_out, **small, **changes))
    path = f"{tmp_path}/validation.jsonl"
    assert [text.partition(": the answer")[0] for text in validating if "validation.jsonl" in text] == [
        f"env.math.gold: {path}:2"
    ]
    assert len(validating) == (3 if trains_on_scores else 1)
    assert told(recipe(name, section | VALIDATED, rows, held_out, math=None, **small, **changes)) == []
    fine = recipe(name, section | VALIDATED, rows[40:], rows[40:], **small, **changes)
    assert told(fine) == []


def test_published_solutions_are_refused_until_the_recipe_says_where_their_answer_is(recipe):
    rows = [
        {"input": f"{n}>", "output": f"Tom had 2*{n} = {2 * n} clips in May.\n#### {2 * n}"}
        for n in range(40)
    ]
    (first, *_, last) = told(recipe("grpo", SAMPLED, rows, math={}))
    assert_holds(first, "rows.jsonl:1: ", rows[0]["output"].replace("\n", " "))
    assert_holds(last, "env.math.gold: ", 35)
    assert told(recipe("grpo", SAMPLED, rows)) == []


def test_a_conversation_is_scored_against_its_last_answer(recipe, tmp_path):
    talk = [{"role": "user", "content": "1>"}, {"role": "assistant", "content": "#### 1"}]
    bad = [*talk[:1], {"role": "assistant", "content": "1"}]
    config = recipe(
        "sft", GIVEN | VALIDATED, [{"messages": talk}] * 300, [{"messages": talk}, {"messages": bad}]
    )
    model = config.policy.model.model_copy(update={"vocab_size": VOCABULARY})
    tokenizer = config.policy.tokenizer.model_copy(update={"name": save_chat_tokenizer(tmp_path / "chat")})
    policy = config.policy.model_copy(
        update={"model": model, "tokenizer": tokenizer, "max_total_sequence_length": 64}
    )
    data = config.data.model_copy(update={"apply_chat_template": True})
    chat = config.model_copy(update={"policy": policy, "data": data})
    found = [text for text in told(chat) if "env.math.gold" in text]
    assert [text.partition(": the answer")[0] for text in found] == [
        f"env.math.gold: {tmp_path}/validation.jsonl:2"
    ]


def test_the_recipe_of_a_checkpoint_keeps_the_sections_and_generate_reads_no_answer(recipe, tmp_path):
    config = recipe("grpo", SAMPLED, solutions(40, wrong={1}))
    (tmp_path / "config.yaml").write_text(recipe_text(config))
    saved = load_recipe_of(tmp_path)
    assert saved.env == config.env
    without_start = saved.policy.model_copy(update={"init_checkpoint": None})
    assert preflight(saved.model_copy(update={"policy": without_start}), elsewhere=True, of_a_run=False)


# At the start of a run


@pytest.fixture
def no_cluster(monkeypatch):
    """Ray that must not start."""

    class Started(Exception):
        pass

    def start(cluster):
        raise Started

    monkeypatch.setattr("nemo_rl_mcore.driver.actors.cluster.RayCluster", start)
    return Started


def test_answers_that_only_the_parser_can_judge_stop_the_run_before_ray(recipe, no_cluster, capsys, tmp_path):
    rows = [{"input": f"{n}>", "output": n} for n in range(40)]
    held_out = [*rows[:1], {"input": "1>", "output": "1/0"}]
    bad = [*rows, {"input": "9>", "output": "#"}]
    assert launch.run(recipe("grpo", SAMPLED | VALIDATED, bad, held_out, math={})) == EXIT_FAILED
    said = capsys.readouterr().err
    assert_holds(said, f"{tmp_path}/rows.jsonl:41: ", "'#'")
    assert_holds(said, f"{tmp_path}/validation.jsonl:2: ", "'1/0'")
    with pytest.raises(no_cluster):
        launch.run(recipe("grpo", SAMPLED | VALIDATED, rows, math={}))


def test_a_class_is_asked_for_its_first_step(recipe, no_cluster, capsys):
    config = recipe("grpo", SAMPLED, solutions(40))
    own = {"dataset_name": "custom", "type": "custom_parts:Counting", "train": None, "validation": None}
    config = config.model_copy(update={"data": config.data.model_copy(update=own)})
    assert launch.run(config) == EXIT_FAILED
    said = capsys.readouterr().err
    assert_holds(said, "env.math.gold: prompt 42000: ", "'0'", "'####'", 11)


ANSWERS = [*(str(number) for number in range(20)), r"p \lor q"]


@pytest.mark.parametrize(("unparsable", "rows"), [("zero", 21), ("drop", 20)])
def test_an_answer_that_nothing_can_equal_need_not_end_a_run(recipe, unparsable, rows, capsys):
    given = [{"input": f"{number}>", "output": answer} for number, answer in enumerate(ANSWERS)]
    config = recipe("grpo", SAMPLED, given, math={"unparsable": unparsable})
    parts = open_parts(config)
    assert len(parts.prompts.train) == rows
    assert_holds(capsys.readouterr().err, "env.math.unparsable", "1 of", "p")
    scored = parts.environments[""].score([Prompt(0, "?", ANSWERS[-1])], [ANSWERS[-1]], [True])
    assert scored == [0.0]


def test_such_an_answer_is_refused_unless_the_recipe_takes_it(recipe):
    given = [{"input": f"{number}>", "output": answer} for number, answer in enumerate(ANSWERS)]
    with pytest.raises(RunStoppedError):
        open_parts(recipe("grpo", SAMPLED, given, math={}))


SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nIn all she sold <<48+24=72>>72 clips.\n#### 72"
MARKER = {"after": "####"}


def make(**section):
    environment = make_environment(EnvConfig.model_validate({"math": section}))
    assert isinstance(environment, MathEnvironment)
    return environment


def score(answer, response, /, **section):
    return make(**section).score([Prompt(0, "?", answer)], [response], [True])[0]


@pytest.mark.parametrize(
    ("answer", "response", "wanted"),
    [
        ("1/2", "so the answer is 0.5", 1),
        (r"\frac{1}{2}", r"thus $\boxed{\frac{2}{4}}$.", 1),
        ("42", r"first 41, but in the end \boxed{42}", 1),
        ("42", r"\boxed{41}, near to 42", 0),
        ("x+1", "$1+x$", 1),
        ("1,000", "1000", 1),
        ("42", "", 0),
        ("42", "no number", 0),
        ("50%", r"\boxed{50\%}", 1),
        ("50", r"\boxed{50\%}", 1),
        ("50%", r"\boxed{0.5}", 1),
        ("50%", r"\boxed{51\%}", 0),
        ("1.5e3", r"\boxed{1500}", 1),
        ("1500", r"\boxed{1.5e3}", 1),
        ("A", r"\boxed{\textbf{(A)}}", 1),
        ("A", "The answer is B.", 0),
        ("A", "A or B, so the answer is B", 0),
        ("Yes", r"\boxed{\text{yes}}", 1),
        ("no", r"\boxed{on}", 0),
        ("East", r"\boxed{seat}", 0),
        ("ab", r"\boxed{b \cdot a}", 1),
        (r"\infty", r"\boxed{infinity}", 1),
        ("x", "$x$\nThis is the answer", 1),
    ],
)
def test_expressions_are_compared_by_value(answer, response, wanted):
    assert score(answer, response) == wanted


def test_scores_stand_in_the_order_of_the_responses():
    prompts = [Prompt(7, "1>", "1"), Prompt(8, "2>", "2")]
    assert make().score(prompts * 2, ["1", "1", "2", "2"], [True] * 4) == [1, 0, 0, 1]


@pytest.mark.parametrize(
    "response", ["The answer is 72", "The answer is 72 clips.", r"\boxed{72}", "#### 72", "72"]
)
def test_published_solutions_hold_their_answer_behind_a_marker(response):
    assert score(SOLUTION, response, gold=MARKER) == 1
    assert score(SOLUTION, response.replace("72", "24"), gold=MARKER) == 0


def test_published_solutions_hold_their_answer_in_a_box():
    solution = r"Since $2 \cdot 3 = 6$, there are $\boxed{\frac{1}{6}}$ or $\boxed{\frac{1}{3}}$ of 2 kinds."
    assert score(solution, r"$\frac{2}{6}$", gold={"boxed": True}) == 1
    assert score(solution, r"$\frac{1}{6}$", gold={"boxed": True}) == 0


@pytest.mark.parametrize(
    ("response", "section", "wanted"),
    [
        ("The answer: 3 boxes.\n#### 72", MARKER, 1),
        ("#### 72 clips", MARKER, 1),
        ("#### $72.00$\n#", MARKER, 1),
        ("#### 24\n#### 72", MARKER, 1),
        (r"\boxed{72}", MARKER, 0),
        ("The answer is 72", MARKER, 0),
        (r"24 or \boxed{72}", {"boxed": True}, 1),
        ("72", {"boxed": True}, 0),
        ("it is <72>, not <a>", {"regex": r"<(\d+)>"}, 1),
        ("it is 72", {"regex": r"<(\d+)>"}, 0),
    ],
)
def test_where_a_response_must_state_its_answer(response, section, wanted):
    assert score(SOLUTION, response, gold=MARKER, response=section) == wanted


BOXES = [
    ("42", r"\fbox{42}", 1),
    ("42", r"\framebox{42}", 1),
    ("42", r"\framebox[3cm][c]{$42$}", 1),
    ("42", r"\boxed {42}", 1),
    ("42", r"\boxed{42.}", 1),
    ("42", r"\boxed{7} then \boxed{42}", 1),
    ("7", r"\boxed{7} then \boxed{42}", 0),
    ("2", r"$\boxed{1}$ and $\boxed{2}$", 1),
    ("{1, 2}", r"$\boxed{1}$ and $\boxed{2}$", 0),
    ("{1, 2}", r"\boxed{1, 2}", 1),
    ("1234", r"\boxed{1\,234}", 1),
    ("235", r"\boxed{1\,234}", 0),
    (r"1\,234", r"\boxed{1234}", 1),
    ("1,234,567", r"\boxed{1\,234\;567}", 1),
    ("1234.5", r"\boxed{1~234.5 \text{ cm}}", 1),
    ("1234", r"\boxed{1{,}234 \text{ clips}}", 1),
    ("1234", r"\boxed{1,\!234}", 1),
    ("42", r"The answer is 42: \boxed{}", 0),
]


@pytest.mark.parametrize(("answer", "response", "wanted"), BOXES)
def test_a_box_is_read_alike_with_and_without_a_setting(answer, response, wanted):
    assert score(answer, response) == score(answer, response, response={"boxed": True}) == wanted


@pytest.mark.parametrize("response", [r"so $1\,234$", "The answer is $1\\,234$.", r"#### 1\,234"])
def test_groups_of_digits_are_one_number_outside_of_boxes(response):
    assert [score("1234", response), score("235", response)] == [1, 0]


# Each answer in the four ways that responses state theirs: in a box, said, behind a marker, as a formula.
WAYS = (r"So it is \boxed{%s}", "3 of 4 are left.\nThe answer is %s.", "All 3 count.\n#### %s", "it is $%s$.")


@pytest.mark.parametrize(
    "answer", ["72", "1,234", "A", "(B)", "yes", "Paris", r"\text{Monday}", "50%", "-3", "3/4"]
)
def test_an_answer_equals_itself_however_it_is_stated(answer):
    make().require_answers([Prompt(0, "?", answer)])
    assert [score(answer, way % answer) for way in WAYS] == [1] * 4


@pytest.mark.parametrize("answer", ["72 clips", "18 dollars", "72 square feet"])
def test_a_unit_is_not_compared(answer):
    make().require_answers([Prompt(0, "?", answer)])
    number = answer.partition(" ")[0]
    assert [score(answer, way % answer) for way in WAYS[:3]] == [1] * 3
    assert [score(answer, way % number) for way in WAYS] == [1] * 4
    assert [score(number, way % answer) for way in WAYS[:3]] == [1] * 3
    assert [score(answer, way % "71 clips") for way in WAYS[:3]] == [0] * 3


@pytest.mark.parametrize("answer", ["#", "..", "{", "}", "%", "½", "1/0", "", "env.math.gold: wrong-row"])
def test_answers_that_nothing_can_equal_are_refused(answer):
    rows = [Prompt(0, "?", "1"), Prompt(1, "?", answer, place="rows.jsonl:2"), Prompt(2, "?", answer)]
    with pytest.raises(ConfigError) as caught:
        make().require_answers(rows)
    assert briefs(caught.value.problems) == ["env.math.gold: wrong-row"] * 2


def test_of_many_answers_the_first_are_told():
    with pytest.raises(ConfigError) as caught:
        make(gold=MARKER).require_answers([Prompt(number, "?", "72") for number in range(40)])
    assert len(caught.value.problems) == 6
    assert brief(caught.value.problems[-1]) == "env.math.gold: wrong-row"
    assert_holds(str(caught.value.problems[-1]), 35)


def test_an_answer_that_comes_later_stops_the_run_by_name():
    why = r"env\.math\.gold: prompt 3: the answer '72' has no answer after '####'"
    environment = make(gold=MARKER)
    with pytest.raises(RunStoppedError, match=why):
        environment.score([Prompt(3, "?", "72")], ["72"], [True])


@settings(deadline=None, max_examples=40)  # the first expression takes long: tables are made
@given(st.from_regex(r"-?[0-9]{1,30}(\.[0-9]{1,10})?", fullmatch=True))
def test_numbers_that_are_taken_on_trust_equal_themselves(text):
    assert make().wrong_answers([Prompt(0, "?", text)]) == {}
    assert score(text, rf"\boxed{{{text}}}") == 1


def test_an_answer_that_takes_too_long_is_quoted_in_short(caplog):
    assert score("1", r"\boxed{1}") == 1  # which loads the library
    # Its own alarm would end whatever Python is doing then, the collection of garbage too.
    logging.getLogger("math_verify.parser").error("Timeout during parsing: %s", "1+" * 20_000)
    assert [len(record.getMessage()) for record in caplog.records] == [500]
