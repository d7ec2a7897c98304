"""Agents that play the episodes: what goes with them, and what is refused by its key."""

from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check.machine import agent_problems, needed_packages

RECIPE = "examples/configs/grpo_agents_cpu.yaml"


def test_several_calls_go_with_an_environment_that_scores_one_answer():
    config = load_config(RECIPE, ["env.math={}", "grpo.max_rollout_turns=5"])
    assert config.max_rollout_turns == 5


def test_what_agents_read_of_the_pool_is_not_called_unread(warnings):
    assert not warnings("env.pool.variables=[HOME]", recipe="grpo_agents_cpu.yaml")


def test_a_program_that_is_not_there_is_found_before_ranks_start():
    [problem] = agent_problems(load_config(RECIPE, ["env.endpoint.command=[/no/such/agent]"]))
    assert (problem.code, problem.path) == ("not-found", "env.endpoint.command")
    assert not [*agent_problems(load_config(RECIPE))]


def test_a_tool_parser_of_the_library_needs_it():
    config = load_config(RECIPE, ["env.endpoint.tool_parser=glm"])
    assert "renderers" in [one.name for one in needed_packages(config).values()]
    assert "renderers" not in [one.name for one in needed_packages(load_config(RECIPE)).values()]


def test_an_agent_whose_calls_show_less_needs_no_room_for_two_answers():
    lengths = ["policy.max_total_sequence_length=20", "policy.generation.max_new_tokens=12"]
    assert load_config(RECIPE, [*lengths, "data.max_input_seq_length=8"]).max_rollout_turns > 1
