"""A sample as a run writes it down."""

from nemo_rl_mcore.driver.observability import Sample


def sample(step=1, sample_index=0, *, prompt="1>", response="1", of_validation=False, **changes):
    texts = {"prompt": prompt, "answer": "1", "response": response, "source": ""}
    numbers = {"reward": 1.0, "shaped_reward": 1.0, "prompt_tokens": 2, "response_tokens": 1}
    versions = {"weight_version_min": step - 1, "weight_version_max": step - 1}
    trained = {} if of_validation else {"sample_mask": 1.0}
    return Sample(
        **{"step": step, "prompt_index": 7, "sample_index": sample_index, "truncated": False},
        **(texts | numbers | versions | trained | changes),
    )
