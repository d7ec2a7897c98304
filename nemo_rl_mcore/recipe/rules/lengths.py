"""How long prompts, responses and sequences may be."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.recipe.rules.feature import Rules


def _room(config: RunConfig) -> Iterator[Problem]:
    prompt, response = config.data.max_prompt_length or 1, config.policy.reserved_tokens
    longest = config.policy.max_total_sequence_length
    if config.policy.generation.fit_to_sequence and config.data.max_input_seq_length:
        return  # rows that leave no token for an answer are too long, see data.overlong
    if prompt + response > longest:
        remedy = f"set it to {prompt + response}, or lower the other two"
        # NeMo RL's recipes compute the other two from it, and then they would grow with it; positions do not.
        computed = longest in (config.data.max_input_seq_length, response)
        positions = config.policy.model.longest_sequence
        if computed or prompt + response > positions:
            remedy = f"lower the other two, which together may be {min(longest, positions)}"
        fits = config.policy.generation.fit_to_sequence
        needed = "one token of a response" if fits else f"policy.generation.max_new_tokens: {response}"
        yield Problem(
            "too-small",
            "policy.max_total_sequence_length",
            f"{longest} has no room for the longest prompt ({prompt}: data.max_input_seq_length, or what "
            f"the task needs) and {needed}",
            remedy,
            (
                *(() if config.data.max_input_seq_length else ("data.dataset_name",)),
                "data.max_input_seq_length",
                "data.num_digits",
                "policy.generation.max_new_tokens",
            ),
        )


def _second_answer(config: RunConfig) -> Iterator[Problem]:
    """Yield episodes of several turns that end with the first one, as a second answer never fits.

    An agent may show less in its next call.
    """
    policy = config.policy
    if config.max_rollout_turns == 1 or config.env.endpoint is not None:
        return
    shortest = 1 + 2 * policy.reserved_tokens
    if shortest > (longest := policy.max_total_sequence_length):
        yield Problem(
            "too-small",
            "policy.max_total_sequence_length",
            f"{longest} has no room for two answers of policy.generation.max_new_tokens: "
            f"{policy.reserved_tokens}, so that no episode has a second turn",
            f"set it to {shortest} and what prompts and observations take, or "
            f"{config.algorithm}.max_rollout_turns: 1",
            ("policy.generation.max_new_tokens", f"{config.algorithm}.max_rollout_turns"),
        )


RULES = Rules(of_runs=(_room, _second_answer))
