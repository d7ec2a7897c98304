"""Groups that agents play, with real processes and sockets, in front of an engine that draws by its noise alone."""

import asyncio
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from scripted_engine import Drawing

from nemo_rl_mcore.agents.endpoint import AgentCollector, Endpoint
from nemo_rl_mcore.data.batched_data_dict import EPISODE
from nemo_rl_mcore.data.chat import with_template
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.data.turns import Ending, Reply
from nemo_rl_mcore.driver.rollouts.player import EpisodeForm
from nemo_rl_mcore.driver.rollouts.transcript import require_sampled_ids
from nemo_rl_mcore.engine.engine import EngineDiedError
from nemo_rl_mcore.recipe.load import load_config

CONFIGS = Path(__file__).parents[3] / "examples/configs"
RECIPE = CONFIGS / "grpo_agents_cpu.yaml"
SAMPLES = 3
# Asks once, and leaves its answer to whoever scores it.
SILENT = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = json.dumps({"messages": task["messages"], "rollout": os.environ["OPENAI_API_KEY"]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
print(urllib.request.urlopen(request).status)
"""


@dataclass
class Engine:
    """A `GenerationInterface`, and its `respond`."""

    drawing: Drawing
    batches: list[int] = field(default_factory=list)

    def generate(self, data, *, step, greedy=False):
        self.batches.append(data.size)
        if self.drawing.error is not None:
            raise self.drawing.error
        return self.drawing.answer(data)


class Scoring:
    """An `Environments` that gives an answer its number of messages."""

    def __init__(self):
        self.turns, self.drop_reasons = [], {}

    async def replies_soon(self, turns):
        self.turns += turns
        return [Reply(float(len(turn.messages))) for turn in turns]


def opened(config, tokenizer):
    return Endpoint(config, tokenizer, [tokenizer.eos_token_id], dict(os.environ))


def played(*overrides, drawing=None, soon=False, judges=False, environments=None):
    config = load_config(RECIPE, [*overrides])
    tokenizer = load_tokenizer(config.policy.tokenizer.name)
    prompts = [with_template(Prompt(i, f"{i:02d}?", f"{7 * i:02d}"), tokenizer) for i in range(2)]
    engine = Engine(drawing or Drawing(vocabulary=18))
    with opened(config, tokenizer) as endpoint:
        collector = AgentCollector(
            engine,
            tokenizer,
            16,
            environments or Scoring(),
            form=EpisodeForm(config.max_rollout_turns, 0, 0, None),
            max_drop_rate=1.0,
            endpoint=endpoint,
            judges=judges,
        )
        asked = collector.ask(prompts, SAMPLES)
        if soon:
            return asyncio.run(collector.play(prompts, asked, engine.drawing)), engine
        return collector.play_now(prompts, asked, step=3), engine


def agent(tmp_path, code):
    (path := tmp_path / "agent.py").write_text(code)
    return f"env.endpoint.command=[{sys.executable},{path}]"


def test_a_group_is_the_same_whether_its_calls_are_answered_together_or_one_by_one():
    now, engine = played()
    soon, _ = played(soon=True)
    require_sampled_ids(now)
    assert now["token_mask"].sum() > 0
    assert len(now.samples()) == 2 * SAMPLES
    assert sum(engine.batches) >= 2 * SAMPLES
    assert {*now} == {*soon}
    for name, column in now.items():
        assert (
            torch.equal(column, soon[name]) if isinstance(column, torch.Tensor) else column == soon[name]
        ), name
    assert now["prompt_index"].tolist() == sorted(now["prompt_index"].tolist())
    assert EPISODE not in now or now[EPISODE].max() < 2 * SAMPLES


def test_an_agent_that_gives_no_reward_is_scored_by_the_environment(tmp_path):
    environments = Scoring()
    batch, _ = played(agent(tmp_path, SILENT), judges=True, environments=environments)
    assert batch["rewards"].tolist() == [2.0] * 2 * SAMPLES  # what was asked, and its answer
    assert {turn.prompt.index for turn in environments.turns} == {0, 1}
    assert all(turn.messages[-1].role == "assistant" for turn in environments.turns)


def test_an_agent_that_nobody_scores_is_dropped_and_says_so(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("nemo_rl_mcore.agents.endpoint.RETRIES", 0)
    batch, _ = played(agent(tmp_path, SILENT))
    assert batch["ending"].tolist() == [Ending.DROPPED] * 2 * SAMPLES
    assert batch["sample_mask"].sum() == 0
    assert all("dropped" in replies[-1] for replies in batch["replies"])
    assert capfd.readouterr().err.count("env.endpoint:") == 1


def test_an_agent_that_fails_is_started_again_and_then_dropped(tmp_path):
    code = f"open({str(tmp_path / 'started')!r}, 'a').write('x')\nraise SystemExit(3)"
    batch, _ = played(agent(tmp_path, code))
    assert len((tmp_path / "started").read_text()) == 3 * 2 * SAMPLES
    assert batch["input_lengths"].tolist() == [5] * 2 * SAMPLES
    assert not batch["token_mask"].any()


@pytest.mark.parametrize("soon", [False, True], ids=["together", "one by one"])
def test_what_an_engine_raises_ends_the_group_and_its_agents(soon):
    drawing = Drawing(vocabulary=18)
    drawing.error = EngineDiedError("gone")
    with pytest.raises(EngineDiedError):
        played(drawing=drawing, soon=soon)
