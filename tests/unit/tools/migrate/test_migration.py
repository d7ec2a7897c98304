"""Recipes of NeMo RL become ours: what is kept, what is changed, and what is said."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import assert_holds, briefs

from nemo_rl_mcore.cli import main
from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.config.base import value_at
from nemo_rl_mcore.recipe.load import load_config, load_with_warnings
from nemo_rl_mcore.tools.migrate.draft import Kind
from nemo_rl_mcore.tools.migrate.migrate import migrate, recipe_text

FOLDER = Path(__file__).parents[3] / "fixtures/nemo_rl"
SIX = {
    "dpo-qwen2.5-math7b-1n8g-megatron_fused_linear_logprobs": 0,
    "grpo-llama3.2-1b-instruct-1n8g-megatron": 0,
    "grpo-qwen3-30ba3b-2n8g-megatron_fused_linear_logprobs": 0,
    "grpo_math_1B_megatron": 0,
    "ppo_math_1B_megatron": 0,
    "sft-qwen2.5-math7b-1n8g-megatron_fused_linear_logprobs": 0,
}
"""The exit status of each: 2 where something of theirs is refused."""
OTHERS = {
    "grpo_math_1B": 0,
    "grpo_math_1B_megatron_single_controller": 0,
    "grpo_multiple_datasets": 0,
    "distillation_math_megatron": 2,
}


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        found |= leaves(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return found


def run(name: str, tmp_path: Path) -> tuple[int, Path]:
    ours = tmp_path / "ours.yaml"
    return main(["migrate", str(FOLDER / f"{name}.yaml"), "--output", str(ours)]), ours


@pytest.mark.parametrize(("name", "status"), SIX.items())
def test_the_result_passes_without_an_edit(name, status, tmp_path):
    given, ours = run(name, tmp_path)
    assert given == status
    config, warnings = load_with_warnings(ours)
    assert not warnings
    assert config.data.apply_chat_template


@pytest.mark.parametrize("name", [*SIX, *OTHERS])
def test_what_is_kept_has_its_value_and_nothing_is_lost(name):
    migrated = migrate(FOLDER / f"{name}.yaml")
    draft, theirs = migrated.draft, leaves(migrated.read.tree)
    ours, said = leaves(yaml.safe_load(recipe_text(migrated, name))), {note.path for note in draft.notes}
    accounted = (*said, *draft.dropped, *draft.refused)
    for path, value in theirs.items():
        if (
            path in said or value is None or path in ("data.train", "data.validation")
        ):  # lists, of which a row is below
            continue
        if value_at(draft.tree, path) is not None:
            assert value_at(draft.tree, path) == value, path
        elif path not in ours:
            assert any(path == other or path.startswith(f"{other}.") for other in accounted) or value in (
                {},
                [],
            ), path


@pytest.mark.parametrize(("name", "status"), OTHERS.items())
def test_a_file_is_written_even_where_something_is_open(name, status, tmp_path):
    given, ours = run(name, tmp_path)
    assert given == status
    assert value_at(yaml.safe_load(ours.read_text()), "data.apply_chat_template") is True


def theirs(tmp_path: Path, changes: str, base: str = "grpo_math_1B_megatron") -> Path:
    path = tmp_path / "theirs.yaml"
    path.write_text(f"defaults: {FOLDER / base}.yaml\n{changes}\n")
    return path


@pytest.mark.parametrize(
    ("changes", "path", "value"),
    [
        ("", "data.apply_chat_template", True),
        ("policy: {tokenizer: {chat_template: null}}", "data.apply_chat_template", False),
        ("policy: {tokenizer: {chat_template: default}}", "data.apply_chat_template", True),
        ("", "data.special_tokens_in_content", "parse"),
        ("", "data.overlong", "drop"),
        ("", "policy.generation.fit_to_sequence", True),
        ("", "data.max_input_seq_length", 512),
        ("", "policy.generation.max_new_tokens", 512),
        ("data: {max_input_seq_length: null}", "policy.generation.fit_to_sequence", True),
        ("data: {max_input_seq_length: 100}", "policy.generation.max_new_tokens", 512),
        (
            "policy: {generation: {max_new_tokens: 400}}\ndata: {max_input_seq_length: 112}",
            "policy.generation.fit_to_sequence",
            None,
        ),
        ("policy: {generation: {backend: megatron}}", "policy.generation.backend", "embedded"),
        ("policy: {generation: {backend: sglang}}", "policy.generation.backend", "vllm"),
        (
            "env: {math: {math_verify_impl: dapo_math_verify}}",
            "env.math.response.regex",
            r"(?i)Answer\s*:\s*([^\n]+)",
        ),
        ("env: {code: {num_workers: 8}}", "env.code", None),
        ("checkpointing: {enabled: true, save_period: 15}", "checkpointing.save_period", 20),
        (
            "checkpointing: {enabled: true, save_period: 15, metric_name: null}",
            "checkpointing.save_period",
            15,
        ),
        ("checkpointing: {enabled: true}\ngrpo: {val_period: 0}", "checkpointing.metric_name", None),
        ("data: {prompt_file: p.txt, default: {_override_: true}}", "data.default", {"prompt_file": "p.txt"}),
        (
            "data: {train: [{dataset_name: DAPOMath17K}, {dataset_name: gsm8k, seed: 3}]}",
            "data.train",
            [{"dataset_name": name, "split_validation_size": 0} for name in ("DAPOMath17K", "gsm8k")],
        ),
        (
            "grpo: {async_grpo: null}\nasync_rl: {sampler: {max_lookahead_versions: 2}}",
            "grpo.async_grpo.max_trajectory_age_steps",
            2,
        ),
        (
            "policy: {dtensor_cfg: {enabled: true, tensor_parallel_size: 2}}",
            "policy.megatron_cfg.tensor_model_parallel_size",
            2,
        ),
        (  # total_iters is 5 in torch
            "policy: {dtensor_cfg: {enabled: true}, scheduler: [{name: LinearLR, kwargs: {start_factor: 0.1}}], "
            "optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1.0e-6}}}",
            "policy.megatron_cfg.scheduler",
            {"lr_decay_style": "constant", "lr_warmup_iters": 5, "lr_warmup_init": 1e-7},
        ),
    ],
)
def test_what_a_key_becomes(changes, path, value, tmp_path):
    tree = migrate(theirs(tmp_path, changes)).draft.tree
    assert value_at(tree, path) == value


def test_the_optimizer_of_dtensor_becomes_that_of_megatron():
    tree = migrate(FOLDER / "grpo_math_1B.yaml").draft.tree
    megatron = value_at(tree, "policy.megatron_cfg")
    theirs = yaml.safe_load((FOLDER / "grpo_math_1B.yaml").read_text())["policy"]["optimizer"]["kwargs"]
    assert megatron["enabled"] is True
    assert (megatron["optimizer"]["lr"], megatron["optimizer"]["adam_eps"]) == (theirs["lr"], theirs["eps"])
    assert [megatron["optimizer"]["adam_beta1"], megatron["optimizer"]["adam_beta2"]] == theirs["betas"]
    assert megatron["scheduler"] == {
        "lr_decay_style": "constant",
        "lr_warmup_iters": 50,
        "lr_warmup_init": 5e-7,
    }


@pytest.mark.parametrize(
    ("changes", "path", "told"),
    [
        (
            "policy: {tokenizer: {chat_template: own.jinja}}",
            "policy.tokenizer.chat_template",
            "write the text of that file",
        ),
        (
            "policy: {megatron_cfg: {peft: {enabled: true}}}",
            "policy.megatron_cfg.peft",
            "set policy.megatron_cfg.peft.enabled",
        ),
        (
            "grpo: {new_key: 3}",
            "grpo.new_key",
            "no key of this package, nor of NeMo RL at 7ea279abf (2026-08-22)",
        ),
        (
            "env: {code: {num_workers: 8}}\ndata: {default: {env_name: code}}",
            "env.code",
            "env has math, and custom",
        ),
        (  # of older weights, where a mask would act on their age
            "grpo: {seq_logprob_error_threshold: 1.5, async_grpo: {enabled: true, max_trajectory_age_steps: 1}}",
            "grpo.seq_logprob_error_threshold",
            "warn",
        ),
        (
            "env: {nemo_gym: {config_paths: [a.yaml], effort_levels: {low_weight: 0.1}}}",
            "env.nemo_gym.effort_levels",
            "verifier",
        ),
        (
            "policy: {dtensor_cfg: {enabled: true, lora_cfg: {enabled: true}}}",
            "policy.dtensor_cfg.lora_cfg",
            "all weights are trained",
        ),
        (
            "policy: {dtensor_cfg: {enabled: true}, scheduler: {name: StepLR}, optimizer: {name: torch.optim.AdamW}}",
            "policy.scheduler",
            "its warm-up is linear",
        ),
        (  # factor is 1/3 in torch
            "policy: {dtensor_cfg: {enabled: true}, scheduler: [{name: ConstantLR, kwargs: {}}], "
            "optimizer: {name: torch.optim.AdamW}}",
            "policy.scheduler",
            "its warm-up is linear",
        ),
    ],
)
def test_what_is_missing_here_is_refused_and_stays_as_a_comment(changes, path, told, tmp_path):
    migrated = migrate(theirs(tmp_path, changes))
    (note,) = [note for note in migrated.draft.notes if note.kind is Kind.REFUSED and note.path == path]
    assert told in note.what
    assert not migrated.settled
    assert f"\n# Refused, {path}: " in recipe_text(migrated, "theirs.yaml")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            "policy: {megatron_cfg: {tensor_model_parallel_size: 4}}\ncluster: {gpus_per_node: 4}",
            "policy.megatron_cfg.tensor_model_parallel_size: not-divisible (model_name)",
        ),
        ("policy: {model_name: some/thing}", "policy.model_name: not-found"),
        (
            "data: {train: {dataset_name: NuminaMath-1.5}}",
            "data.train.dataset_name: not-supported",
        ),
        ("grpo: {num_prompts_per_step: '${gone}'}", "grpo.num_prompts_per_step: reference"),
    ],
)
def test_what_only_the_user_can_settle_is_left_with_what_check_says(changes, told, tmp_path):
    migrated = migrate(theirs(tmp_path, changes))
    assert told in briefs(migrated.problems)
    assert any(note.kind is Kind.OPEN and told.startswith(f"{note.path}: ") for note in migrated.draft.notes)
    assert not migrated.settled


@pytest.mark.parametrize(
    ("section", "told"),
    [
        (
            "model_name: other/model",
            "value.model_name: not-supported",
        ),
        (
            "precision: float32",
            "value.precision: not-supported",
        ),
        (
            "reward_model_cfg: {enabled: true}",
            "value.reward_model_cfg: not-supported",
        ),
        (
            "megatron_cfg: {optimizer: {fp16: true}}",
            "value.megatron_cfg.optimizer.fp16: not-supported",
        ),
        ("megatron_cfg: {optimizer: {lrr: 1.0}}", "value.megatron_cfg.optimizer.lrr: not-supported"),
    ],
)
def test_a_critic_that_differs_from_the_policy_is_told_where_it_is_written(section, told, tmp_path):
    problems = migrate(theirs(tmp_path, f"value: {{{section}}}", "ppo_math_1B_megatron")).problems
    assert told in briefs(problems)


def test_a_critic_cut_another_way_is_told(tmp_path):
    changes = "value: {megatron_cfg: {tensor_model_parallel_size: 2}}"
    notes = migrate(theirs(tmp_path, changes, "ppo_math_1B_megatron")).draft.notes
    (note,) = [note for note in notes if note.path == "value.megatron_cfg.tensor_model_parallel_size"]
    assert_holds(note.what, 2, "policy.megatron_cfg.tensor_model_parallel_size: 1")


def test_our_own_critic_is_untouched(load_ppo):
    assert load_ppo("value.optimizer.lr=0.5").value.optimizer.lr == 0.5


@pytest.fixture
def load_ppo():
    return lambda *overrides: load_config(FOLDER.parents[2] / "examples/configs/ppo_cpu.yaml", overrides)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "not-readable"),
        ("- a", "wrong-kind"),
        ("defaults: missing.yaml\ngrpo: {}", "not-found"),
        ("rm: {}\npolicy: {}", "wrong-kind"),
        ("eval: {}\ngeneration: {}", "wrong-kind"),
        ("grpo: {a: 1}\nsft: {a: 1}", "wrong-kind"),
        ("grpo: {a: 1}", "wrong-kind"),
        ("grpo: {a: 1}\npolicy: {model_name: x}", "wrong-kind"),
    ],
)
def test_what_is_no_recipe(text, code, tmp_path, capsys):
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(text)
    with pytest.raises(ConfigError) as caught:
        migrate(theirs)
    (problem,) = caught.value.problems
    assert problem.code == code
    assert str(theirs) in problem.path
    assert main(["migrate", str(theirs), "--output", str(tmp_path / "ours.yaml")]) == 1
    assert str(theirs) in capsys.readouterr().err
    assert not (tmp_path / "ours.yaml").exists()


def test_no_file_is_overwritten(tmp_path, capsys):
    (tmp_path / "ours.yaml").write_text("mine")
    assert run("grpo_math_1B_megatron", tmp_path)[0] == 1
    assert_holds(capsys.readouterr().err, "--output", tmp_path / "ours.yaml")
    assert (tmp_path / "ours.yaml").read_text() == "mine"


def test_the_name_of_the_file_where_none_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["migrate", str(FOLDER / "grpo_math_1B_megatron.yaml")]) == 0
    assert (tmp_path / "grpo_math_1B_megatron_mcore.yaml").exists()


def test_an_unknown_section_is_refused_and_said(tmp_path):
    migrated = migrate(theirs(tmp_path, "new_section: {a: 1}"))
    assert [note.path for note in migrated.draft.notes if note.kind is Kind.REFUSED] == ["new_section"]
    assert "\n# Refused, new_section: {a: 1}; " in recipe_text(migrated, "theirs.yaml")


@pytest.mark.parametrize("wrong", [["--nonsense"], ["--output"]])
def test_a_wrong_command_line_writes_no_file_and_says_so_in_its_status(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["migrate", str(FOLDER / "grpo_math_1B_megatron.yaml"), *wrong])
    assert caught.value.code == 1
    assert not [*tmp_path.iterdir()]


def test_overrides_are_of_their_recipe(tmp_path):
    ours = tmp_path / "ours.yaml"
    given = ("policy.train_global_batch_size=256", "policy.megatron_cfg.peft.enabled=true")
    status = main(
        ["migrate", str(FOLDER / "grpo_math_1B_megatron.yaml"), given[0], "--output", str(ours), given[1]]
    )
    assert status == 2
    text = ours.read_text()
    assert text.startswith(
        "# Made by `nemo-rl-mcore migrate` of NeMo RL's grpo_math_1B_megatron.yaml policy.train_g"
    )
    assert given[1] in text.splitlines()[0]
    assert value_at(yaml.safe_load(text), "policy.megatron_cfg.scheduler.lr_warmup_iters") == 26
    assert "# Refused, policy.megatron_cfg.peft: " in text
