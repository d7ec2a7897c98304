"""Which answers of a data set are scored against, and that the others are refused before Ray or a rank starts."""

import json

import pytest
import yaml
from chat_tokenizer import VOCABULARY, save_chat_tokenizer
from refusals import assert_holds

from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.driver import run as launch
from nemo_rl_mcore.driver.parts import open_parts
from nemo_rl_mcore.driver.run_folder import recipe_text
from nemo_rl_mcore.driver.signals import EXIT_FAILED
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.check.given_weights import load_recipe_of

pytestmark = pytest.mark.needs("math")
GOLD = {"gold": {"after": "####"}}
SAMPLED = {
    "num_prompts_per_step": 16,
    "num_generations_per_prompt": 16,
    "max_num_steps": 1,
    "val_period": 0,
    "val_at_end": False,
}
GIVEN = {"max_num_steps": 1}
VALIDATED = {"val_at_end": True, "max_val_samples": 2}


def solutions(count, wrong=()):
    """Rows of which some state no answer; every letter is one of the character tokenizer."""
    rows = ({"input": f"{number}>", "output": f"####{number}"} for number in range(count))
    return [row | {"output": str(number)} if number in wrong else row for number, row in enumerate(rows)]


@pytest.fixture
def recipe(tmp_path, request):
    """A recipe of any algorithm over rows to train on and rows to validate with, scored by env.math."""

    def make(name, section, rows, held_out=None, *, math=GOLD, file="recipe.yaml", **changes):
        tree = yaml.safe_load((request.config.rootpath / "examples/configs/grpo_copy_cpu.yaml").read_text())
        files = {"train": rows, "validation": rows[:4] if held_out is None else held_out}
        for part, content in files.items():
            text = "".join(f"{json.dumps(row)}\n" for row in content)
            (tmp_path / f"{file}.{part}.jsonl").write_text(text)
        paths = {part: {"data_path": str(tmp_path / f"{file}.{part}.jsonl")} for part in files}
        tree["data"] = {"dataset_name": "jsonl", **paths}
        tree["env"] = {"math": math}
        loop = tree.pop("grpo")
        if name != "grpo":
            del tree["loss_fn"]
        tree[name] = (loop if name == "grpo" else {}) | section
        tree["logger"] = {"log_dir": str(tmp_path / "results")}
        tree |= changes
        (tmp_path / file).write_text(yaml.safe_dump(tree))
        return load_config(tmp_path / file)

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
    small = {"policy": yaml.safe_load(recipe_text(recipe("grpo", SAMPLED, rows)))["policy"]}
    small["policy"]["model"]["max_position_embeddings"] = 16
    small["policy"] |= {
        "max_total_sequence_length": 16,
        "train_global_batch_size": 16,
        "train_micro_batch_size": 8,
        "logprob_batch_size": 8,
    }
    held_out = rows[19:60]
    silent = recipe(name, section | {"val_at_end": False}, rows, held_out, **small, **changes)
    path = f"{tmp_path}/recipe.yaml.train.jsonl"
    assert [text.partition(": the answer")[0] for text in told(silent)] == [
        f"env.math.gold: {path}:{line}" for line in (21, 31) if trains_on_scores
    ]
    validating = told(recipe(name, section | VALIDATED, rows, held_out, **small, **changes))
    path = f"{tmp_path}/recipe.yaml.validation.jsonl"
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
    assert_holds(first, "recipe.yaml.train.jsonl:1: ", rows[0]["output"].replace("\n", " "))
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
        f"env.math.gold: {tmp_path}/recipe.yaml.validation.jsonl:2"
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

    monkeypatch.setattr(launch, "RayCluster", start)
    return Started


def test_answers_that_only_the_parser_can_judge_stop_the_run_before_ray(recipe, no_cluster, capsys, tmp_path):
    rows = [{"input": f"{n}>", "output": n} for n in range(40)]
    held_out = [*rows[:1], {"input": "1>", "output": "1/0"}]
    bad = [*rows, {"input": "9>", "output": "#"}]
    assert launch.run(recipe("grpo", SAMPLED | VALIDATED, bad, held_out, math={})) == EXIT_FAILED
    said = capsys.readouterr().err
    assert_holds(said, f"{tmp_path}/recipe.yaml.train.jsonl:41: ", "'#'")
    assert_holds(said, f"{tmp_path}/recipe.yaml.validation.jsonl:2: ", "'1/0'")
    with pytest.raises(no_cluster):
        launch.run(recipe("grpo", SAMPLED | VALIDATED, rows, math={}))


def test_a_class_is_asked_for_its_first_step(recipe, no_cluster, capsys):
    config = recipe("grpo", SAMPLED, solutions(40))
    own = {"dataset_name": "custom", "type": "custom_parts:Counting", "train": None, "validation": None}
    config = config.model_copy(update={"data": config.data.model_copy(update=own)})
    assert launch.run(config) == EXIT_FAILED
    said = capsys.readouterr().err
    assert_holds(said, "env.math.gold: prompt 42000: ", "'0'", "'####'", 11)


def test_embedded_tasks_are_scored_as_ever(no_cluster):
    env = "env={math: {}}"
    with pytest.raises(no_cluster):
        launch.run(load_config("examples/configs/grpo_copy_cpu.yaml", [env]))


ANSWERS = [*(str(number) for number in range(20)), r"p \lor q"]


@pytest.mark.parametrize(("unparsable", "rows"), [("zero", 21), ("drop", 20)])
def test_an_answer_that_nothing_can_equal_need_not_end_a_run(recipe, unparsable, rows, capsys):
    given = [{"input": f"{number}>", "output": answer} for number, answer in enumerate(ANSWERS)]
    config = recipe("grpo", SAMPLED, given, math={"unparsable": unparsable})
    parts = open_parts(config)
    assert len(parts.prompts.train) == rows
    assert_holds(capsys.readouterr().err, "env.math.unparsable", "1 of", "p")
    scored = parts.environment.score([Prompt(0, "?", ANSWERS[-1])], [ANSWERS[-1]], [True])
    assert scored == [0.0]


def test_such_an_answer_is_refused_unless_the_recipe_takes_it(recipe):
    given = [{"input": f"{number}>", "output": answer} for number, answer in enumerate(ANSWERS)]
    with pytest.raises(RunStoppedError):
        open_parts(recipe("grpo", SAMPLED, given, math={}))
