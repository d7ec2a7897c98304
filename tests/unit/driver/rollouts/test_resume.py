"""What a checkpoint holds of rollouts, and how a run goes on from it; real checkpoints and ledgers, fake engines."""

import json
import shutil
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch
from fake_engines import TOKENS, FakeEngines
from ledger_machine import check
from processes import within
from refusals import assert_holds, refused
from saved_steps import save

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.run_checkpoints import open_checkpoints
from nemo_rl_mcore.driver.parts import open_parts
from nemo_rl_mcore.driver.rollouts.events import Timeline, read_events
from nemo_rl_mcore.driver.rollouts.ledger import GroupState
from nemo_rl_mcore.driver.rollouts.player import RolloutCollector
from nemo_rl_mcore.driver.rollouts.saved import SavedRollouts
from nemo_rl_mcore.driver.rollouts.scheduler import Draw
from nemo_rl_mcore.driver.rollouts.start import open_rollouts, read_saved, without_strangers
from nemo_rl_mcore.driver.rollouts.transcript import RESPONSES
from nemo_rl_mcore.environment.interface import LocalEnvironments
from nemo_rl_mcore.environment.turns import Ending
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.recipe.load import load_config

RECIPE = Path(__file__).parents[4] / "examples/configs/grpo_copy_async_cpu.yaml"
N, ROWS, LAST = 3, 2, 6


class Answering(FakeEngines):
    """Answers with tokens that no other answer has."""

    def __init__(self, **keys):
        super().__init__(**keys)
        self._answers = count()

    async def respond(self, data, *, step, ticket):
        versions = (await super().respond(data, step=step, ticket=ticket))["weight_versions"]
        shape = (data.size, TOKENS)
        return BatchedDataDict(
            tokens=torch.full(shape, 3),
            logprobs=torch.full(shape, -1.0 - next(self._answers)),
            lengths=torch.full((data.size,), TOKENS),
            finished=torch.ones(data.size, dtype=torch.bool),
            weight_versions=versions,
        )


class FakePolicy:
    def save_checkpoint(self, folder, *, wait=True):
        Path(folder, "weights").write_text("weights")


class Going:
    """A run under way: its rollouts and its checkpoints."""

    def __init__(self, rollouts, checkpoints):
        self.rollouts, self.checkpoints = rollouts, checkpoints

    def train(self, step, *, save=False):
        with self.rollouts.open_step(step) as opened:
            opened.whole()
            opened.finishing()
            opened.finish()
            trained = [position for chunk in self.rollouts.ledger.chunks_of(step) for position in chunk]
        self.rollouts.update_weights(step)
        if save:
            self.save(step)
        return trained

    def save(self, step):
        save(self.checkpoints, step, {"policy": FakePolicy()}, {}, {"total": 0})

    def wait_for_ready(self, wanted):
        assert within(5, lambda: self.rollouts.ledger.count(GroupState.READY) == wanted)


def configure(root, *overrides, max_age=1):
    given = (
        *(f"logger.log_dir={root}/log", f"checkpointing.checkpoint_dir={root}/saved"),
        *("checkpointing.keep_top_k=null", f"grpo.num_prompts_per_step={N}", f"grpo.max_num_steps={LAST}"),
        *(f"grpo.num_generations_per_prompt={ROWS}", f"policy.train_global_batch_size={N * ROWS}"),
        f"grpo.async_grpo.max_trajectory_age_steps={max_age}",
    )
    return load_config(RECIPE, [*given, *overrides])


def collector_of(config, engines):
    parts = open_parts(config)
    environments = LocalEnvironments(parts.environments[""])
    return RolloutCollector(engines, parts.tokenizer, config.max_prompt_length, environments)


@contextmanager
def going(root, *overrides, engines=None, **keys):
    config, engines = configure(root, *overrides, **keys), engines or Answering()
    Path(config.logger.log_dir).mkdir(parents=True, exist_ok=True)
    checkpoints = open_checkpoints(config, lambda line: None)
    saved, prompts = read_saved(config, checkpoints.start), open_parts(config).prompts
    step = checkpoints.resumed_step or 0
    collector, extra = collector_of(config, engines), checkpoints.extra_parts
    with open_rollouts(config, engines, prompts, collector, step, saved, extra) as rollouts:
        rollouts.update_weights(step)
        yield Going(rollouts, checkpoints)


def same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def log_of(root):
    return read_events(root / "log/groups.jsonl")


def trained(root):
    found = Timeline.of(log_of(root))
    return found.positions(range(1, max(found.chunks) + 1))


def run_to_a_checkpoint(root, *overrides, step=2, behind=1, **keys):
    """Steps up to a checkpoint, whose next groups are ready, and some behind it; gives the ready groups' data."""
    with going(root, *overrides, **keys) as run:
        for one in range(1, step + 1):
            run.train(one)
        run.wait_for_ready(N * (run.rollouts.ledger.limits.max_age + 1))
        run.save(step)
        positions = sorted(run.rollouts.ledger.retained(step))
        ready = {position: run.rollouts.groups.get(position) for position in positions}
        for one in range(step + 1, step + 1 + behind):
            run.train(one)
    return ready


@pytest.mark.parametrize("max_age", [0, 1, 2])
def test_ready_groups_are_ready_again_with_their_data_and_nothing_is_asked_twice(tmp_path, max_age, capsys):
    ready = run_to_a_checkpoint(tmp_path, max_age=max_age)
    engines = Answering()
    with going(tmp_path, engines=engines, max_age=max_age) as run:
        ledger = run.rollouts.ledger
        assert (ledger.version, ledger.incarnation) == (2, 1)
        for position, group in ready.items():
            again = run.rollouts.groups.get(position)
            assert [*again] == [key for key in group if key != RESPONSES]
            assert all(same(again[key], group[key]) for key in again)
            assert ledger._groups[position].min_version == int(group["weight_versions"][:, -TOKENS:].min())
        for step in range(3, LAST + 1):
            run.train(step)
            check(ledger)
    first = 2 * N + len(ready)
    assert [*ready] == [*range(2 * N, first)]
    assert {ticket.partition(",")[0] for ticket in engines.asked} == {
        f"group {number}" for number in range(first, LAST * N)
    }
    assert len(engines.asked) == LAST * N - first
    assert trained(tmp_path) == [*range(LAST * N)]
    kept = f"prompts are answered from number {first} on: the answers to {len(ready)} prompts are kept\n"
    assert kept in capsys.readouterr().out


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_checkpoint_may_be_whole_some_steps_after_its_own(tmp_path, restarts):
    with going(tmp_path, f"cluster.max_trainer_restarts={restarts}") as run:
        for step in (1, 2, 3):
            run.train(step)
        assert (0 in run.rollouts.groups) is (restarts > 0), "its steps may have to be trained again"
        run.rollouts.checkpointed(1)
        run.rollouts.checkpointed(3)
        run.train(4)
        assert min(run.rollouts.groups, default=LAST * N) >= 3 * N
    assert [event.step for event in log_of(tmp_path) if event.kind == "checkpointed"] == [1, 3]


def test_drops_before_the_checkpoint_are_exact(tmp_path):
    bad = Answering(fail=lambda ticket: ValueError("no") if ticket.startswith("group 1,") else None)
    keys = ("grpo.async_grpo.max_generation_failures=1",)
    with going(tmp_path, *keys, engines=bad) as run:
        assert run.train(1) == [0, 2, 3]
        run.wait_for_ready(2 * N)
        run.save(1)
        before = run.rollouts.ledger.to_json()
    with going(tmp_path, *keys) as run:
        again = run.rollouts.ledger
        assert (again.dropped, again.cursor) == ({"ValueError": 1}, before["cursor"])
        assert [run.train(step) for step in range(2, LAST + 1)][-1] == [16, 17, 18]
    assert trained(tmp_path) == [position for position in range(LAST * N + 1) if position != 1]


def test_a_run_is_resumed_again_and_again_and_its_log_is_its_history(tmp_path):
    run_to_a_checkpoint(tmp_path)
    mark = read_saved(configure(tmp_path), open_checkpoints(configure(tmp_path), print).start).log
    whole = (tmp_path / "log/groups.jsonl").read_bytes()
    for start in (1, 2):
        with going(tmp_path) as run:
            assert run.rollouts.ledger.incarnation == 1
            run.train(3)
        assert (tmp_path / "log/groups.jsonl").read_bytes()[: mark.size] == whole[: mark.size]
        assert (tmp_path / f"log/groups.{start}.jsonl").exists()
        assert [event.version for event in log_of(tmp_path) if event.kind == "started"] == [0, 2]
    assert (tmp_path / "log/groups.1.jsonl").read_bytes() == whole[mark.size :]
    with going(tmp_path) as run:
        run.train(3, save=True)
    with going(tmp_path) as run:
        assert run.rollouts.ledger.incarnation == 2
        run.train(4)
    assert trained(tmp_path) == [*range(4 * N)]


def test_an_older_step_and_a_new_start_set_aside_what_was_behind(tmp_path):
    with going(tmp_path) as run:
        for step in (1, 2, 3):
            run.train(step, save=True)
    folder = tmp_path / "log/groups"
    with going(tmp_path, f"checkpointing.resume={tmp_path}/saved/step_1") as run:
        assert {path.name for path in folder.iterdir()} == {"step_1", "aside_step_2", "aside_step_3"}
        run.train(2)
    assert trained(tmp_path) == [*range(2 * N)]
    with going(tmp_path, "checkpointing.resume=never") as run:
        assert run.rollouts.ledger.incarnation == 0
        run.train(1)
    assert trained(tmp_path) == [*range(N)]
    names = {path.name for path in folder.iterdir()}
    assert names == {"step_1", "aside_step_1", "aside_step_2", "aside_step_2.1", "aside_step_3"}
    assert {path.name for path in (tmp_path / "log").glob("groups.*jsonl")} == {
        *("groups.jsonl", "groups.1.jsonl", "groups.2.jsonl")
    }


@pytest.mark.parametrize("log", ["none", "another"])
def test_a_log_that_is_not_the_checkpoint_s_is_begun_anew_with_the_groups_that_are_kept(tmp_path, log):
    ready = run_to_a_checkpoint(tmp_path)
    before = Timeline.of(log_of(tmp_path)).groups
    shutil.rmtree(tmp_path / "log")
    if log == "another":
        (tmp_path / "log").mkdir()
        (tmp_path / "log/groups.jsonl").write_text('{"kind":"begun","step":1}\n' * 500)
    with going(tmp_path) as run:
        run.train(3)
    told = Timeline.of(log_of(tmp_path))
    assert [*told.chunks] == [3]
    assert {position: told.groups[position] for position in ready} == {p: before[p] for p in ready}
    assert (tmp_path / "log/groups.1.jsonl").exists() == (log == "another")


def test_what_is_saved_while_groups_are_answered_is_what_the_log_says_up_to_there(tmp_path):
    engines = Answering(hold=lambda ticket: 0.0005 * (int(ticket[6 : ticket.index(",")]) % 7))
    overrides = ("grpo.max_num_steps=20", "grpo.async_grpo.max_inflight_prompts=3")
    found = []
    with going(tmp_path, *overrides, engines=engines, max_age=3) as run:
        for step in range(1, 15):
            run.train(step)
            folder = tmp_path / f"rollouts_{step}"
            run.checkpoints.extra_parts["rollouts"](folder)
            run.rollouts.checkpointed(step)
            found.append(SavedRollouts.load(folder, step))
    log = (tmp_path / "log/groups.jsonl").read_bytes()
    partly = 0
    for step, saved in enumerate(found, 1):
        (tmp_path / "part").write_bytes(log[: saved.log.size])
        events = read_events(tmp_path / "part")
        answered = {event.token.position for event in events if event.kind == "committed"}
        dispatched = {event.token.position for event in events if event.kind == "dispatched"}
        assert saved.ledger.ready == [*saved.ready] == sorted(answered - {*range(step * N)})
        assert saved.ledger.cursor == len(dispatched)
        partly += len(dispatched) > len(answered)
    assert partly, "some were in flight"


def latest(root):
    return open_checkpoints(configure(root), lambda line: None).start


# What is not whole, or of another recipe


FILES = ("ledger.json", "ready/groups.safetensors", "ready/groups.json", "ready/SHA256SUMS")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [Path.unlink, flip], ids=["missing", "flipped"])
def test_a_damaged_file_is_told_by_name(tmp_path, name, damage):
    run_to_a_checkpoint(tmp_path)
    path = tmp_path / "saved/step_2/rollouts" / name
    damage(path)
    config = configure(tmp_path, f"checkpointing.resume={tmp_path}/saved/step_2")
    with pytest.raises(RunStoppedError, match=rf"^checkpointing\.resume: .*{path.parent}"):
        read_saved(config, open_checkpoints(config, print).start)


def test_a_checkpoint_without_its_rollouts_is_not_whole(tmp_path):
    with going(tmp_path) as run:
        for step in (1, 2):
            run.train(step, save=True)
    shutil.rmtree(tmp_path / "saved/step_2/rollouts")
    with going(tmp_path) as run:
        assert run.checkpoints.resumed_step == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda file: file.pop("log"), "unreadable-file"),
        (lambda file: file["ledger"].update(cursor=99), "ledger-positions"),
        (lambda file: file["ledger"].update(version=3), "unequal-files"),
        (lambda file: file["ledger"]["groups"][0].update(min_version=None), "unequal-files"),
    ],
)
def test_a_ledger_that_cannot_be_is_told(tmp_path, change, code):
    run_to_a_checkpoint(tmp_path)
    start = latest(tmp_path)
    path = start.folder / "rollouts/ledger.json"
    file = json.loads(path.read_text())
    change(file)
    path.write_text(json.dumps(file))
    with refused(code, "checkpointing.resume: ", by=RunStoppedError):
        read_saved(configure(tmp_path), start)


def test_another_number_of_prompts_is_refused(tmp_path):
    run_to_a_checkpoint(tmp_path)
    config = configure(tmp_path, "grpo.num_prompts_per_step=2", "policy.train_global_batch_size=4")
    with refused("groups-per-step", "grpo.num_prompts_per_step", 2, 3, by=RunStoppedError):
        read_saved(config, latest(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["policy.generation.temperature=0.5"], "policy.generation.temperature: 0.5 (was 1.0)"),
        (
            ["grpo.async_grpo.max_trajectory_age_steps=0"],
            "grpo.async_grpo.max_trajectory_age_steps: 0 (was 1)",
        ),
        (["grpo.async_grpo.order=as_completed"], "grpo.async_grpo.order: as_completed (was in_order)"),
        (["seed=7"], "not the run's"),
        (["data.num_digits=2", "grpo.max_val_samples=4"], "not the run's"),
        (["grpo.num_generations_per_prompt=4", f"policy.train_global_batch_size={N * 4}"], "as many"),
    ],
)
def test_groups_that_are_none_of_the_run_any_more_are_answered_again(tmp_path, overrides, told, capsys):
    ready = run_to_a_checkpoint(tmp_path)
    engines = Answering()
    with going(tmp_path, *overrides, engines=engines) as run:
        assert run.train(3) == [6, 7, 8]
        check(run.rollouts.ledger)
    assert engines.asked[0].startswith("group 6, attempt 1.")
    said = capsys.readouterr().out
    assert_holds(said, len(ready), told, "number 6 ")


def test_a_group_with_an_answer_that_nobody_replied_to_is_answered_again(tmp_path, capsys):
    ready = run_to_a_checkpoint(tmp_path)
    config = configure(tmp_path)
    saved = read_saved(config, latest(tmp_path))
    saved.ready[min(ready)]["ending"][1] = Ending.DROPPED
    left = without_strangers(
        saved, Draw(open_parts(config).prompts, collector_of(config, Answering()), N, ROWS)
    )
    assert [*left.ready] == [*ready][1:]
    assert "1 prompts " in capsys.readouterr().out


@pytest.mark.parametrize(
    "override", ["grpo.async_grpo.max_trajectory_age_steps=2", "policy.megatron_cfg.optimizer.lr=0.5"]
)
def test_other_changes_keep_the_groups(tmp_path, override):
    ready = run_to_a_checkpoint(tmp_path)
    engines = Answering()
    with going(tmp_path, override, engines=engines) as run:
        assert run.train(3) == [6, 7, 8]
    assert not {ticket.partition(",")[0] for ticket in engines.asked} & {f"group {p}" for p in ready}


def test_a_synchronous_run_goes_on_with_the_weights_and_its_own_prompts(tmp_path, capsys):
    run_to_a_checkpoint(tmp_path)
    config = configure(tmp_path, "grpo.async_grpo.enabled=false")
    saved = read_saved(config, open_checkpoints(config, lambda line: None).start)
    assert (saved.ledger.version, saved.ledger.ready, saved.ready) == (2, [], {})
    assert_holds(capsys.readouterr().out, "6 prompts are answered again")
