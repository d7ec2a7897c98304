"""`nemo-rl-mcore rehearse` as a user calls it: what it proves of sound recipes, and which line finds a mistake."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nemo_rl_mcore.tools.rehearse import command
from nemo_rl_mcore.tools.rehearse.runs import Killer

REPO = Path(__file__).parents[2]
THEIRS = REPO / "tests/fixtures/nemo_rl"
LLM = REPO / "examples/configs/recipes/llm"
CALL = (sys.executable, "-c", "import sys; from nemo_rl_mcore.cli import main; sys.exit(main())", "rehearse")
COPY = "examples/configs/grpo_copy_cpu.yaml"
UNKNOWN_MODEL = {"distillation_math_megatron"}
ALWAYS = {
    "resume = continue",
    "rates = schedule",
    "layout = one rank",
    "split step = train",
    "export = import",
    "export = transformers",
}


def rehearse(*arguments, file, **environment):
    """Return the exit status, the verdict of each line, and the JSON."""
    ended = subprocess.run(
        [*CALL, *arguments, "--json", str(file)],
        env=os.environ | environment, cwd=REPO, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert file.exists(), ended.stderr + ended.stdout
    found = json.loads(file.read_text())
    return ended.returncode, {line["name"]: line["verdict"] for line in found["lines"]}, found


def recipes():
    """The recipes of NeMo RL that migrate, and ours of the families that these lack; `.ci/run` rehearses two."""
    theirs = [path for path in sorted(THEIRS.glob("*.yaml")) if path.stem not in UNKNOWN_MODEL]
    ours = [
        LLM / f"{name}.yaml"
        for name in (
            "distillation-qwen3-8b-to-0.6b-1n8g-megatron-fused",
            "grpo-qwen2.5-math-7b-1n8g-megatron-async-1off-fused",
            "grpo-qwen2.5-1.5b-instruct-calculator-1n8g-megatron-fused",
        )
    ]
    return [pytest.param(path, id=path.stem) for path in [*theirs, *ours]]


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", recipes())
def test_a_sound_recipe(recipe, tmp_path):
    code, verdicts, found = rehearse(str(recipe), file=tmp_path / "found.json")
    assert "FAILED" not in verdicts.values(), found["lines"]
    assert (code, found["failed"]) == (0, False)
    asynchronous = "async" in recipe.stem or "single_controller" in recipe.stem
    expected = ALWAYS - {"resume = continue"} if asynchronous else ALWAYS
    if found["algorithm"] == "ppo":
        expected = {*expected, "critic = one rank"}
    if found["layouts"] == ["one rank"]:
        expected = expected - {"layout = one rank", "critic = one rank"}
    assert {name for name, verdict in verdicts.items() if verdict == "proven"} >= expected
    assert found["layouts"]
    assert any(one["path"] == "policy.model.hidden_size" for one in found["shrinks"])


OURS_ON_GPUS, IN_THEIRS = (
    "examples/configs/quickstart/grpo_7B_8gpu.yaml",
    str(THEIRS / "grpo_math_1B_megatron.yaml"),
)


@pytest.mark.parametrize(
    ("recipe", "called"), [(COPY, "grpo --config"), (OURS_ON_GPUS, "grpo --config"), (IN_THEIRS, "migrate")]
)
def test_a_rehearsal_ends_with_the_command_that_comes_next(monkeypatch, capsys, recipe, called):
    monkeypatch.setattr(command, "_rehearse", lambda *_: None)  # the runs, which prove nothing here
    monkeypatch.chdir(REPO)
    assert command.run_rehearse(recipe, 2, None, ["grpo.max_num_steps=3"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.findall(r"`([^`]+)`", last) == [f"nemo-rl-mcore {called} {recipe} grpo.max_num_steps=3"]


def test_a_rank_is_said_to_be_killed_by_the_rehearsal_itself(capsys):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:
        workers = SimpleNamespace(identities={0: SimpleNamespace(pid=rank.pid)})
        trained = SimpleNamespace(workers=workers, train_microbatch=lambda: None)
        policy = cast("Any", Killer().model("policy", cast("Any", trained)))
        for _ in range(2):
            policy.train_microbatch()
            assert rank.wait(10) == -signal.SIGKILL
    assert len(capsys.readouterr().out.splitlines()) == 1


LINES = {
    "schedule_counts_twice": "rates = schedule",
    "optimizer_state_is_not_saved": "resume = continue",
    "moments_are_not_saved_after_a_resume": "resume = continue",
    "shards_are_swapped_in_export": "export = import",
    "gradients_are_divided_by_the_ranks_once_more": "layout = one rank",
    "gradients_are_not_summed_over_context_ranks": "layout = one rank",
    "masks_are_ignored": "masked = ignored",
    "refits_are_stale": "engines = weights",
    "experts_are_in_the_wrong_order_in_export": "export = import",
    "gradients_of_values_are_divided_by_the_ranks_once_more": "critic = one rank",
    "new_ranks_do_not_read_the_checkpoint": "resume = continue",
    "other_ranks_train_on_their_first_chunk_again": "split step = train",
    "another_rope_base_is_exported": "export = transformers",
}
"""Each planted mistake, and the line that is to find it."""
TENSOR = (COPY, "cluster.cpu_workers_per_node=4", "policy.megatron_cfg.tensor_model_parallel_size=2")
APART = (COPY, "cluster.cpu_workers_per_node=2", "policy.generation.colocated.enabled=false")
CONTEXT = (
    COPY, "cluster.cpu_workers_per_node=4", "policy.megatron_cfg.context_parallel_size=2",
    "policy.megatron_cfg.use_fused_linear_logprobs=false",
)  # fmt: skip
EXPERTS = (
    COPY, "cluster.cpu_workers_per_node=2", "policy.megatron_cfg.expert_model_parallel_size=2",
    "++policy.model.num_moe_experts=4", "++policy.model.moe_router_topk=2", "++policy.model.moe_ffn_hidden_size=32",
    "++policy.model.qk_layernorm=true",  # a family of Hugging Face has it
)  # fmt: skip
CRITIC = ("examples/configs/ppo_cpu.yaml", "cluster.cpu_workers_per_node=2")
PLANTED = [
    # Mistakes that do not hide each other share a rehearsal; the last column is a line that none of them reaches.
    (TENSOR, ("schedule_counts_twice", "optimizer_state_is_not_saved"), "export = import"),
    (TENSOR, ("shards_are_swapped_in_export",), "layout = one rank"),
    (
        TENSOR,
        (
            *("new_ranks_do_not_read_the_checkpoint", "other_ranks_train_on_their_first_chunk_again"),
            "another_rope_base_is_exported",
        ),
        "layout = one rank",
    ),
    (APART, ("gradients_are_divided_by_the_ranks_once_more", "refits_are_stale"), "export = import"),
    (APART, ("masks_are_ignored",), "rates = schedule"),
    (CONTEXT, ("gradients_are_not_summed_over_context_ranks",), "rates = schedule"),
    (
        CRITIC,
        ("gradients_of_values_are_divided_by_the_ranks_once_more", "moments_are_not_saved_after_a_resume"),
        "layout = one rank",
    ),
    (EXPERTS, ("experts_are_in_the_wrong_order_in_export",), "layout = one rank"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("recipe", "faults", "sound"), [pytest.param(*case, id="-".join(case[1])) for case in PLANTED]
)
def test_planted_mistakes_are_found_by_their_lines(recipe, faults, sound, tmp_path):
    section, loss = (
        ("loss_fn", "ClippedPGLossFn") if recipe is not CRITIC else ("value_loss_fn", "MseValueLossFn")
    )
    (tmp_path / "planted.py").write_text(
        "from planted_faults import plant\n"
        f"from nemo_rl_mcore.losses import {loss}\n"
        f"class Faulty({loss}):\n    pass\n"
        f"plant(*{faults!r})\n"
    )
    paths = os.pathsep.join(filter(None, [str(tmp_path), str(REPO / "tests"), os.environ.get("PYTHONPATH")]))
    code, verdicts, found = rehearse(
        *recipe, f"++{section}.type=planted:Faulty", file=tmp_path / "found.json",
        PYTHONPATH=paths,
    )  # fmt: skip
    assert (code, found["failed"]) == (1, True)
    for fault in faults:
        assert verdicts[LINES[fault]] == "FAILED", found["lines"]
    assert verdicts[sound] == "proven", found["lines"]


def test_every_mistake_is_planted():
    assert {fault for _, faults, _ in PLANTED for fault in faults} == LINES.keys()
