"""From arguments of Python to a recipe."""

import json
import signal
import sys
from functools import partial
from inspect import signature
from pathlib import Path

import datasets
import pandas
import pytest
import torch
import yaml
from chat_templates import APPENDING, byte_tokenizer
from chat_tokenizer import VOCABULARY, save_chat_tokenizer

from nemo_rl_mcore import (
    DPO,
    GRPO,
    PPO,
    SFT,
    ConfigError,
    Distillation,
    RunStoppedError,
    load_config,
    load_recipe,
)
from nemo_rl_mcore.api.algorithms import TRL
from nemo_rl_mcore.config.custom_code import function_at, handed
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.driver.signals import deferred_stop_signals
from nemo_rl_mcore.environment.interface import LocalEnvironments
from nemo_rl_mcore.environment.registry import make_environment
from nemo_rl_mcore.environment.turns import first_turn
from nemo_rl_mcore.errors import code_of
from nemo_rl_mcore.recipe.schema import fields

MODEL = {
    "model": load_config("grpo_copy_cpu.yaml").policy.model.model_dump(exclude_unset=True),
    "tokenizer": {"name": "char"},
}
ROWS = [{"prompt": f"{n:03d}>", "answer": f"{n:03d}", "target": f"{n}", "other": n} for n in range(20)]


def right(responses, answers):
    return [float(response == answer) for response, answer in zip(responses, answers, strict=True)]


def near(responses, target):
    return [float(one in response) for response, one in zip(responses, target, strict=True)]


class Shorter:
    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, responses, target):
        return [float(len(response) < self.most) for response in responses]

    def of_target(self, responses, target):
        return self(responses, target)


def grpo(tmp_path: Path, **given) -> GRPO:
    common = {"train": ROWS, "reward": right, "max_length": 8, "max_new_tokens": 4, "gpus": 0}
    return GRPO(None, **({"out": tmp_path / "run", "recipe": {"policy": MODEL}, **common} | given))


def problems(call, *given, **more):
    """The problems that a call is refused with."""
    with pytest.raises(ConfigError) as caught:
        call(*given, **more)
    return caught.value.problems


def test_rows_of_memory_become_a_file_whose_columns_are_named(tmp_path):
    run = grpo(tmp_path, reward=[right, near])
    [path] = run.config.data.train.paths
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == ROWS
    source = run.config.data.train
    assert (source.input_key, source.output_key, source.columns) == ("prompt", "answer", ("target",))
    assert source.split_validation_size == 0


def test_other_rows_of_memory_leave_the_file_of_the_first_as_it_is(tmp_path):
    first, other, again = (grpo(tmp_path, train=rows).config.data.train for rows in (ROWS, ROWS[:9], ROWS))
    assert first == again
    assert first.name == other.name == "train"
    rows = [Path(one.data_path).read_text().splitlines() for one in (first, other)]
    assert [len(one) for one in rows] == [20, 9]


@pytest.mark.parametrize("resume", ["auto", "never", "must"])
def test_how_a_run_resumes_is_the_key_of_that_name(tmp_path, resume):
    assert grpo(tmp_path, resume=resume).config.checkpointing.resume == resume


@pytest.mark.parametrize("lora", [16, {"dim": 16, "alpha": 32, "target_modules": ["linear_qkv"]}])
def test_adapters_are_a_rank_or_the_keys_of_their_section(tmp_path, lora):
    peft = grpo(tmp_path, lora=lora).config.policy.megatron_cfg.peft
    assert (peft.enabled, peft.dim, peft.alpha) == (True, 16, 32)
    assert peft.target_modules == (() if lora == 16 else ("linear_qkv",))
    assert not grpo(tmp_path).config.policy.megatron_cfg.peft.enabled


def test_a_data_set_of_the_library_and_a_file_are_the_same_recipe(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    of_list, of_library, of_frame, of_file = (
        grpo(tmp_path, train=train).config.data.train
        for train in (ROWS, datasets.Dataset.from_list(ROWS), pandas.DataFrame(ROWS), str(path))
    )
    assert of_list == of_library == of_frame
    assert of_file == of_list.model_copy(update={"data_path": str(path)})


def test_functions_have_names_and_those_of_no_module_are_handed_over(tmp_path):
    run = grpo(tmp_path, reward={"exact": right, "own": lambda responses: [0.0] * len(responses)})
    assert run.config.env.rewards == {"exact": f"{__name__}:right", "own": "__main__:own"}
    assert [*run._code.objects] == ["__main__:own"]


def test_a_set_that_lacks_a_column_of_a_reward_is_refused_before_ranks_start(tmp_path):
    (tmp_path / "held.jsonl").write_text('{"input": "527>", "output": "527"}\n')
    sets = {"held": {"data_path": str(tmp_path / "held.jsonl")}}
    run = grpo(tmp_path, reward=near, recipe={"policy": MODEL, "eval": {"sets": sets}})
    with pytest.raises(RunStoppedError, match=r"eval\.sets\.held\.columns") as caught:
        run.eval()
    assert code_of(caught.value.__cause__) == "unknown-column"


def test_what_is_imported_for_a_run_leaves_the_search_path_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_folder.py").write_text(
        "def right(responses):\n    return [1.0] * len(responses)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    before = [*sys.path]
    with handed({}):
        assert function_at("rewards_of_folder:right", "env.rewards.right")(["1"]) == [1.0]
        assert str(tmp_path) in sys.path
    assert sys.path == before


def test_code_that_cannot_travel_is_refused_before_ranks_start(tmp_path):
    with (tmp_path / "log").open("w") as log:
        run = grpo(tmp_path, reward={"own": lambda responses: [log.write(one) for one in responses]})
        [problem] = problems(next, iter(run))
    assert (problem.code, problem.path) == ("not-supported", "__main__:own")


def test_classes_stand_anywhere_in_the_recipe(tmp_path):
    class Own:
        def compute_advantage(self, prompt_ids, rewards, mask, **logprobs):
            return mask

    run = grpo(tmp_path, recipe={"policy": MODEL, "grpo": {"adv_estimator": {"type": Own}}})
    assert run.config.grpo.adv_estimator.type == "__main__:Own"
    assert run._code.objects["__main__:Own"] is Own


def test_the_recipe_of_a_run_is_one_of_the_commands(tmp_path):
    run = grpo(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(run.recipe())
    assert load_config(path) == run.config
    assert yaml.safe_load(run.recipe())["grpo"]["num_prompts_per_step"] == 8


OPTIMIZER = "policy.megatron_cfg.optimizer.lr"


@pytest.mark.parametrize(
    ("given", "path", "where"),
    [
        ({"lr": -1.0}, OPTIMIZER, "argument lr"),
        ({"lr": 1.0, "overrides": [f"{OPTIMIZER}=-1"]}, OPTIMIZER, "overrides"),
        ({"generations": 0}, "grpo.num_generations_per_prompt", "argument generations"),
        ({"steps": -3}, "grpo.max_num_steps", "argument steps"),
        ({"steps": 0}, "grpo.max_num_steps", "argument steps"),
        ({"reward": None}, "env", "argument reward"),
        ({"train": None}, "data", "argument train"),
        ({"overrides": ["grpo.val_peroid=3"]}, "grpo.val_peroid", "overrides"),
        (
            {"recipe": {"policy": MODEL, "loss_fn": {"ratio_clip_mix": 0.2}}},
            "loss_fn.ratio_clip_mix",
            "argument recipe",
        ),
        ({"reward": [right, near], "reward_weights": [1.0]}, "env.reward_weights", "argument reward_weights"),
        *(
            ({name: "8"}, None, f"argument {name}")
            for name in ("generations", "prompts_per_step", "gpus", "steps", "max_length", "seed")
        ),
    ],
)
def test_a_mistake_names_the_argument(tmp_path, given, path, where):
    told = problems(grpo, tmp_path, **given)
    assert where in {problem.where for problem in told if path in (None, problem.path)}


@pytest.mark.parametrize(
    ("given", "code", "path"),
    [
        ({"train": []}, "too-few-rows", "data.train"),
        ({"train": [{"text": "527>"}]}, "missing", "data.train.input_key"),
        (
            {"reward": [lambda responses: responses, lambda responses: responses]},
            "contradicts",
            "env.rewards",
        ),
        *(
            ({"reward": reward}, "not-allowed", "env.rewards")
            for reward in ([Shorter], {"own": Shorter}, object(), [3])
        ),
    ],
)
def test_what_is_no_row_or_reward_is_one_problem(tmp_path, given, code, path):
    [problem] = problems(grpo, tmp_path, **given)
    assert (problem.code, problem.path) == (code, path)


def test_a_parameter_that_is_no_column_is_told_with_all_else_that_is_wrong(tmp_path):
    def judged(completions, target, other=None, missing=0, **columns):
        return completions

    held_out = [{"prompt": "527>", "answer": "527"}]
    told = problems(grpo, tmp_path, reward=judged, lr=-1.0, validation=held_out)
    # completions, of train and of validation; target
    assert [(problem.path, problem.code) for problem in told][:3] == [("env.rewards.judged", "missing")] * 3
    assert OPTIMIZER in {problem.path for problem in told}


def test_rows_without_a_prompt_are_refused(tmp_path):
    told = problems(SFT, None, train=[{"text": "527> 527"}], gpus=0, out=tmp_path)
    [problem] = [one for one in told if one.path == "data.train.input_key"]
    assert problem.code == "missing"
    assert "`text`" in str(problem)


@pytest.mark.parametrize(
    ("given", "code", "path"),
    [
        ({"train": datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))}, "wrong-kind", "data.train"),
        (
            {"validation": datasets.DatasetDict(test=datasets.Dataset.from_list(ROWS))},
            "wrong-kind",
            "data.validation",
        ),
        ({"model": torch.nn.Linear(1, 1)}, "wrong-kind", "policy.model_name"),
    ],
)
def test_an_object_that_is_no_source_and_no_model_is_refused(tmp_path, given, code, path):
    own = {"model": None, "train": ROWS, "reward": right, "gpus": 0, "out": tmp_path}
    assert (path, code) in {(one.path, one.code) for one in problems(GRPO, **own | given)}


def test_a_validation_takes_the_rows_that_there_are(tmp_path):
    """64 at most, unless a key says otherwise."""
    run = grpo(tmp_path, validation=ROWS[:5])
    assert run.plan().plan.data.held_out == 5
    assert run.config.loop.max_val_samples == 64


def test_metrics_have_a_row_for_each_step_that_trained_and_validations_one_for_each_of_theirs(tmp_path):
    run = grpo(tmp_path, validation=ROWS[:5])
    assert (run.metrics(), run.validations()) == ([], [])
    rows = [
        {"step": 0, "validation/accuracy": 0.25, "timing/validation": 1.0},
        {"step": 1, "train/reward": 0.5},
        {"step": 2, "train/reward": 0.75, "validation/accuracy": 0.5, "validation/reward": 0.5},
    ]
    (run.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [row["train/reward"] for row in run.metrics()] == [0.5, 0.75]
    assert run.validations() == [
        {"step": 0, "validation/accuracy": 0.25},
        {"step": 2, "validation/accuracy": 0.5, "validation/reward": 0.5},
    ]


def test_what_is_wrong_with_a_source_names_its_argument(tmp_path):
    for given, path in (
        ("nowhere.jsonl", "data.train.data_path"),
        ({"data_path": "x"}, "data.train.data_path"),
    ):
        told = problems(lambda given=given: grpo(tmp_path, train=given).plan())
        assert (path, "argument train") in {(one.path, one.where) for one in told}
    own = {"train": ROWS, "max_length": 8, "gpus": 0, "batch_size": 4, "recipe": {"policy": MODEL}}
    [problem] = problems(DPO(None, out=tmp_path, **own).plan)
    assert (problem.path, problem.where) == ("data.train.chosen_key", "argument train")


def test_a_recipe_may_say_how_answers_are_scored(tmp_path):
    assert grpo(tmp_path, reward=None, overrides=["env.unscored=drop"]).config.env.unscored == "drop"
    given = {"policy": MODEL, "env": {"unscored": "drop"}}
    assert grpo(tmp_path, reward=None, recipe=given).config.env.unscored == "drop"


def test_a_validation_of_distillation_needs_what_scores_it(tmp_path):
    given = {"train": ROWS, "teacher": None, "max_length": 8, "max_new_tokens": 4, "gpus": 0, "out": tmp_path}
    given |= {"recipe": {"policy": MODEL, "teacher": {"init_checkpoint": "there"}}}
    given["recipe"] |= {"distillation": {"topk_logits_k": 8}}
    assert Distillation(None, **given).config.loop.val_at_end is False
    [problem] = problems(Distillation, None, validation=ROWS, **given)
    assert (problem.path, problem.where) == ("env", "argument reward")
    assert Distillation(None, validation=ROWS, reward=right, **given).config.loop.val_at_end


def test_rows_without_an_answer_need_reward_functions(tmp_path):
    rows = [{"prompt": "527>"}]
    assert grpo(tmp_path, train=rows).config.data.train.output_key is None
    told = problems(grpo, tmp_path, train=rows, reward=None)
    assert "data.train.output_key" in {problem.path for problem in told}


@pytest.mark.parametrize(
    ("make", "rows", "more"),
    [
        (PPO, ROWS, {"reward": right, "max_new_tokens": 4}),
        (Distillation, ROWS, {"teacher": None, "max_new_tokens": 4, "reward": right}),
        (SFT, ROWS, {"batch_size": 4}),
        (DPO, [{"prompt": "1>", "chosen": "1", "rejected": "2"}] * 4, {"batch_size": 4}),
    ],
)
def test_each_algorithm_has_a_door(tmp_path, make, rows, more):
    of_teacher = {"teacher": {"init_checkpoint": "there"}, "distillation": {"topk_logits_k": 8}}
    recipe = {"policy": MODEL, **(of_teacher if make is Distillation else {})}
    run = make(None, train=rows, max_length=8, gpus=0, out=tmp_path, recipe=recipe, steps=2, **more)
    assert run.config.algorithm == make.__name__.lower()
    assert run.config.loop.max_num_steps == 2


def test_a_recipe_of_the_package_opens_by_its_name():
    run = load_recipe("grpo_copy_cpu.yaml", ["grpo.max_num_steps=7"])
    assert run.config == load_config("grpo_copy_cpu.yaml", ["grpo.max_num_steps=7"])
    assert "samples" in repr(run.plan())


def test_the_plan_shows_the_first_prompt_as_the_model_sees_it(tmp_path):
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    model = {**MODEL["model"], "vocab_size": VOCABULARY, "max_position_embeddings": 64}
    policy = {"model": model, "tokenizer": {"name": tokenizer}}
    for chat, shown in ((True, "<turn>user\n000><end>\n<turn>assistant\n"), (False, "000>")):
        recipe = {"policy": policy, "data": {"apply_chat_template": chat}}
        assert grpo(tmp_path, recipe=recipe, max_length=64).plan().first_prompt == shown
    assert grpo(tmp_path).plan().first_prompt is None  # of characters: it is the row


def test_gpus_that_are_not_there_are_told_by_the_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run = grpo(tmp_path, gpus=4)
    for refused in (run.plan, run.train):
        told = {(problem.path, problem.code, problem.where) for problem in problems(refused)}
        assert ("cluster.gpus_per_node", "too-large", "argument gpus") in told
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")  # whose machines Ray knows
    assert run.plan().plan.config.cluster.world_size == 4


def test_a_tokenizer_with_more_tokens_than_the_model_is_told_by_the_plan(tmp_path):
    """Its class adds one while it loads, which no file of the folder names."""
    tokenizer = byte_tokenizer(tmp_path / "model", APPENDING)
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    config |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "model_type": "qwen2"}
    config |= {"architectures": ["Qwen2ForCausalLM"], "vocab_size": tokenizer.vocab_size}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "model/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    [lacking] = {"<|endoftext|>"} - {*tokenizer.special_tokens}
    own = {"train": ROWS, "reward": right, "gpus": 0, "out": tmp_path / "run"}
    of_arguments = GRPO(tmp_path / "model", **own)
    (tmp_path / "recipe.yaml").write_text(of_arguments.recipe())
    of_file = load_recipe(tmp_path / "recipe.yaml")
    of_overrides = load_recipe(tmp_path / "recipe.yaml", [f"policy.tokenizer.name={tmp_path}/model"])
    for run, where in (
        (of_arguments, "argument model"),
        (of_file, f"{tmp_path}/recipe.yaml:"),
        (of_overrides, "overrides"),
    ):
        [problem] = problems(run.plan)
        assert (problem.path, problem.code) == ("policy.tokenizer.name", "contradicts")
        assert problem.where.startswith(where)
        assert lacking in problem.what


@pytest.mark.parametrize("left_by_one", [True, False])
def test_a_signal_while_the_ranks_stop_ends_the_loop_once(monkeypatch, left_by_one):
    """Where an earlier one has ended the loop, the run is closed by Python, which nobody could catch another from."""

    def steps(config, **_how):
        try:
            yield {"step": 1}
        finally:
            with deferred_stop_signals(hold=True):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("nemo_rl_mcore.driver.run.train", steps)
    loop = iter(load_recipe("grpo_copy_cpu.yaml"))
    next(loop)
    raised = []
    for action in [lambda: signal.raise_signal(signal.SIGINT)] * left_by_one + [loop.close]:
        try:
            action()
        except KeyboardInterrupt:
            raised.append(action)
    assert len(raised) == 1


def test_what_can_be_called_is_a_reward(tmp_path):
    given = {
        "partial": partial(near),
        "own": Shorter(3),
        "method": Shorter(4).of_target,
        "path": f"{__name__}:right",
    }
    run = grpo(tmp_path, reward=given)
    own = {name: f"__main__:{name}" for name in ("partial", "own")}
    assert run.config.env.rewards == own | {"method": "__main__:of_target", "path": f"{__name__}:right"}
    assert run.config.data.train.columns == ("target",)
    with handed(run._code.objects):
        environment = make_environment(run.config.env)
    weights = run.config.env.reward_weights
    turn = first_turn(Prompt(0, "1>", "1", columns={"target": "12"}), "12", finished=True)
    assert [reply.reward for reply in LocalEnvironments(environment, weights).replies([turn])] == [3.0]


def test_arguments_of_other_trainers_are_told_together_with_what_is_wrong_with_their_values(tmp_path):
    of_trl = {"train_dataset": ROWS, "reward_funcs": right, "num_generations": 1, "learning_rate": -1.0}
    own = {"recipe": {"policy": MODEL}, "gpus": 0, "max_length": 8, "out": tmp_path}
    told = [(problem.code, problem.path) for problem in problems(GRPO, None, beta=0.0, **own, **of_trl)]
    assert told[:5] == [("unknown-key", name) for name in ("beta", *of_trl)]
    assert {path for _, path in told[5:]} == {OPTIMIZER}


def test_what_is_meant_by_an_argument_of_another_trainer_exists():
    of_all = {name for make in (GRPO, PPO, DPO, SFT, Distillation) for name in signature(make).parameters}
    keys = {
        ending
        for kind in RUN_CONFIGS.values()
        for path in fields(kind)
        for ending in (path, path.split(".")[-1])
    }
    assert {*TRL.values()} <= of_all | keys


@pytest.mark.parametrize(
    ("make", "given", "meant"),
    [
        (GRPO, "num_generations", "generations"),
        (GRPO, "prompt_per_step", "prompts_per_step"),
        (GRPO, "max_num_steps", "grpo.max_num_steps"),
        (GRPO, "per_device_train_batch_size", "prompts_per_step"),
        (SFT, "per_device_train_batch_size", "batch_size"),
        (DPO, "beta", "dpo.reference_policy_kl_penalty"),
    ],
)
def test_an_unknown_argument_has_its_nearest_one(make, given, meant):
    [problem] = [one for one in problems(make, "model", **{given: 1}) if one.code == "unknown-key"]
    assert problem.path == given
    assert meant in problem.remedy


def test_weights_may_stand_in_the_order_of_the_functions(tmp_path):
    run = grpo(tmp_path, reward=[right, near], reward_weights=[1.0, 0.5])
    assert run.config.env.reward_weights == {"right": 1.0, "near": 0.5}
