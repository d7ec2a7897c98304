"""Agents that play the episodes: what goes with them, and what is refused by its key."""

from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check.machine import agent_problems, needed_packages

RECIPE = "examples/configs/grpo_agents_cpu.yaml"


def test_a_program_that_is_not_there_is_found_before_ranks_start():
    [problem] = agent_problems(load_config(RECIPE, ["env.endpoint.command=[/no/such/agent]"]))
    assert (problem.code, problem.path) == ("not-found", "env.endpoint.command")
    assert not [*agent_problems(load_config(RECIPE))]


def test_a_tool_parser_of_the_library_needs_it():
    config = load_config(RECIPE, ["env.endpoint.tool_parser=glm"])
    assert "renderers" in [one.name for one in needed_packages(config).values()]
    assert "renderers" not in [one.name for one in needed_packages(load_config(RECIPE)).values()]
