"""Folders of runs, as a run leaves them, without one."""

import json

from written_samples import sample

from nemo_rl_mcore.config.logger import LoggerConfig
from nemo_rl_mcore.driver.observability import RolloutSink
from nemo_rl_mcore.driver.observability.sinks import JsonlSink
from nemo_rl_mcore.driver.rollouts import events
from nemo_rl_mcore.driver.rollouts.events import EVENTS_FILE, EventLog

HOSTILE = '</script><img src=x onerror="throw 1">{{script}}\u2028<b>bold</b>'


def rows(count, **columns):
    """Metrics of `count` steps; a column is a value, or a function of the step."""
    usual = {
        "train/reward": lambda step: step / count,
        "train/loss": lambda step: 1 / step,
        "timing/generation": 0.5,
        "timing/train": 0.25,
        "timing/total": 1.0,
    }
    return [
        {name: value(step) if callable(value) else value for name, value in (usual | columns).items()}
        for step in range(1, count + 1)
    ]


def write_run(folder, metrics, *, steps=None, answers=2, **changes):
    """The folder of a run with these rows, and answers to each step; steps: those that its recipe asks for."""
    log = JsonlSink(folder)
    rollouts = RolloutSink(folder, LoggerConfig(), None)
    for step, row in enumerate(metrics, 1):
        given = [sample(step, number, reward=number / answers, **changes) for number in range(answers)]
        rollouts.log(step, given)
        log.log(step, row)
    log.close()
    if steps is not None:
        (folder / "config.yaml").write_text(f"seed: 1\ngrpo:\n  max_num_steps: {steps}\n", "utf-8")
    return folder


def write_events(folder):
    """The log of a run that was resumed, lost ranks once, and had to ask twice for an answer."""
    token = events.Token(incarnation=0, position=3, attempt=1)
    happened = (
        events.Started(incarnation=0, version=0),
        events.Failed(token=token, reason="timeout", dropped=False),
        events.Lost(step=2, reason="rank 1 died"),
        events.Started(incarnation=1, version=1),
    )
    with EventLog(folder / EVENTS_FILE) as log:
        for event in happened:
            log.append(event)


def write_results(folder, mean=0.5):
    folder.mkdir(parents=True, exist_ok=True)
    metrics = {"accuracy": {"mean": mean, "stderr": 0.1}, "pass@4": {"mean": 1.0, "stderr": None}}
    results = {"digits": {"prompts": 4, "samples": 8, "metrics": metrics}}
    (folder / "results.json").write_text(json.dumps(results), "utf-8")
