"""How long prompts, responses and sequences may be."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.master import RunConfig
from nemo_rl_mcore.config.rules.feature import Rules


def _room(config: RunConfig) -> Iterator[Problem]:
    prompt, response = config.data.max_prompt_length or 1, config.policy.generation.max_new_tokens
    longest = config.policy.max_total_sequence_length
    if prompt + response > longest:
        remedy = f"set it to {prompt + response}, or lower the other two"
        # NeMo RL's recipes compute the other two from it, and then they would grow with it; positions do not.
        computed = longest in (config.data.max_input_seq_length, response)
        positions = config.policy.model.max_position_embeddings
        if computed or prompt + response > positions:
            remedy = f"lower the other two, which together may be {min(longest, positions)}"
        yield Problem(
            "policy.max_total_sequence_length",
            f"{longest} has no room for the longest prompt ({prompt}: data.max_input_seq_length, or what "
            f"the task needs) and policy.generation.max_new_tokens: {response}",
            remedy,
            (
                *(() if config.data.max_input_seq_length else ("data.dataset_name",)),
                "data.max_input_seq_length",
                "data.num_digits",
                "policy.generation.max_new_tokens",
            ),
        )


RULES = Rules(of_runs=(_room,))
