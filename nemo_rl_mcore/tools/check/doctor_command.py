"""`nemo-rl-mcore doctor`: asks, judges and prints."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.driver.console import open_console
from nemo_rl_mcore.driver.folders import folders_of
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.tools.check import doctor_machine as machine
from nemo_rl_mcore.tools.check import doctor_packages as packages
from nemo_rl_mcore.tools.check import doctor_ray_session as ray_session
from nemo_rl_mcore.tools.check.doctor_accelerators import Accelerators
from nemo_rl_mcore.tools.check.doctor_children import Answer, ask
from nemo_rl_mcore.tools.check.doctor_findings import Diagnosis, section
from nemo_rl_mcore.tools.check.doctor_recipe import Machines, Recipe, findings, read_recipe
from nemo_rl_mcore.tools.check.doctor_render import render

_HERE = Path(__file__).parents[2]
EXIT_NEEDED = 1
"""Exit status where something that is needed is missing or wrong."""


def run_doctor(recipe: str | None, overrides: Sequence[str], *, as_json: bool, deadline_s: float) -> int:
    """Tell what there is; give 1 where something is missing or wrong that runs, or the recipe, need."""
    diagnosis = diagnose(None if recipe is None else read_recipe(recipe, overrides), deadline_s)
    if as_json:
        write_line(sys.stdout, json.dumps(diagnosis.as_json(), indent=2))
    else:
        console = open_console(highlight=False)
        console.print(render(diagnosis, console.width), soft_wrap=True)
    return EXIT_NEEDED if diagnosis.stopping else 0


def diagnose(recipe: Recipe | None, deadline_s: float) -> Diagnosis:
    """Look at everything; what is asked of packages, driver and names takes no longer than the deadline in all."""
    config = recipe.config if recipe is not None else None
    address = os.environ.get("RAY_ADDRESS", "")
    questions = {"driver": ("driver",), "host name": ("host_name",), **packages.questions()}
    answers = {**ray_session.unreachable(address)}
    answers |= ask(questions if answers else {**questions, **ray_session.question(address)}, deadline_s)
    gpus = Accelerators(answers["driver"], answers.get("torch", Answer()))
    on_cpu = not gpus.gpus if config is None else config.cluster.on_cpu
    base = section(f"nemo-rl-mcore {version('nemo-rl-mcore')}, in {_HERE}", packages.base_findings(answers))
    extras = section("Extras", packages.extra_findings(answers, on_cpu=on_cpu))
    sections = [
        base,
        section("GPUs", gpus.findings(on_cpu=on_cpu)),
        extras,
        section("This machine", machine.findings(_folders(config), answers["host name"])),
        section("Ray", [ray_session.finding(address, answers)]),
    ]
    if recipe is not None:
        found = {one.name: one for one in (*base.findings, *extras.findings)}
        machines = Machines(machine.memory_bytes(), gpus.gpus, ray_session.gpus_by_machine(address, answers))
        sections.append(section("The recipe", findings(recipe, found, machines)))
    return Diagnosis(tuple(sections))


def _folders(config: RunConfig | None) -> dict[str, Path]:
    return {"working folder": Path.cwd()} if config is None else folders_of(config)
