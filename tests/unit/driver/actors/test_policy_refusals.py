"""A batch that no rank could take is refused by `Policy` itself: nothing of it is sent."""

import pytest
import torch
from fake_backend import FakeBackend
from refusals import refused

from nemo_rl_mcore.config import ClippedPGLossConfig, ConfigError, PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.losses import ClippedPGLossFn
from nemo_rl_mcore.rank.train_step import TrainStep, TrainStepError
from nemo_rl_mcore.rank.worker import MegatronPolicyWorker
from nemo_rl_mcore.recipe.load import load_config

LOSS = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))


class Ranks:
    """A group of two data-parallel ranks that must be sent no rows."""

    placement = None

    def __init__(self, *_args, **_options):
        self.calls = []

    def share(self, value):
        return value

    def run_all(self, method, *, per_rank_kwargs=(), **_options):
        assert not per_rank_kwargs, f"sent: {method}"
        self.calls.append(method)
        return [0, 1]


@pytest.fixture
def policy():
    return Policy(load_config("examples/configs/grpo_copy_cpu.yaml").policy, None, seed=0, group=Ranks)


def batch(**replaced):
    whole = {
        "input_ids": torch.randint(0, 32, (4, 6)),
        "input_lengths": torch.full((4,), 3),
        "prompt_index": torch.arange(4),
        "sample_index": torch.zeros(4).long(),
        "token_mask": torch.ones(4, 6),
        "sample_mask": torch.ones(4),
        "advantages": torch.zeros(4, 6),
        "prev_logprobs": torch.zeros(4, 6),
        "generation_logprobs": torch.zeros(4, 6),
    } | replaced
    return BatchedDataDict({key: value for key, value in whole.items() if value is not None})


def train_microbatch(policy, data):
    policy.begin_train_step(LOSS)
    policy.train_microbatch(data)


def test_a_chunk_without_an_open_step_is_refused_before_it_is_sent(policy):
    with refused("step-is-idle", "begin_train_step", by=TrainStepError) as of_policy:
        policy.train_microbatch(batch())
    with refused("step-is-idle", by=TrainStepError) as of_rank:
        TrainStep(FakeBackend()).microbatch(batch())
    assert str(of_policy.value) == str(of_rank.value)


LONG = {"input_lengths": torch.tensor([6, 6, 6, 7])}
READS = {
    "get_logprobs": lambda policy, data: policy.get_logprobs(data),
    "get_reference_policy_logprobs": lambda policy, data: policy.get_reference_policy_logprobs(data),
    "get_topk_logits": lambda policy, data: policy.get_topk_logits(data, 2),
    "get_values": lambda policy, data: policy.get_values(data),
    "generate": lambda policy, data: policy.generate(data, step=1, stop_ids=[1], greedy=True),
    "train": lambda policy, data: policy.train(data, LOSS, gbs=4),
    "train_microbatch": lambda policy, data: train_microbatch(policy, data),
}


@pytest.mark.parametrize("method", READS)
def test_every_method_that_takes_rows_refuses_before_it_sends(policy, method):
    with refused("batch", "input_lengths: 7", 3):
        READS[method](policy, batch(**LONG))
    with pytest.raises(AssertionError, match=f"^sent: {method}"):
        READS[method](policy, batch())


def test_more_choices_than_tokens_are_refused(policy):
    with refused("batch", "k: 33", 32):
        policy.get_topk_logits(batch(), 33)


def test_a_chunk_is_judged_by_the_loss_of_the_open_step(policy):
    lacking = batch(advantages=None)
    for call in (lambda: policy.train(lacking, LOSS), lambda: policy.train(lacking, LOSS, eval_mode=True)):
        with refused("batch", "advantages: missing"):
            call()
    policy.begin_train_step(LOSS)
    with refused("batch", "advantages: missing"):
        policy.train_microbatch(lacking)


def test_prompts_that_leave_no_room_for_a_response_are_refused_before_they_are_sent(policy):
    longest = policy._config.max_total_sequence_length
    data = batch(input_ids=torch.ones(4, longest).long(), input_lengths=torch.tensor([1, 1, longest, 1]))
    with refused("prompt-length", "row 2", longest):
        policy.generate(data, step=1, stop_ids=[1], greedy=True)


FUSED = "megatron_cfg.use_fused_linear_logprobs"
OVERLAP = "megatron_cfg.distributed_data_parallel_config.overlap_param_gather"


@pytest.mark.parametrize(
    "make",
    [MegatronPolicyWorker, lambda policy: Policy(policy, None, seed=0, group=Ranks)],
    ids=["worker", "policy"],
)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("megatron_cfg.context_parallel_size", 2),
        ("sequence_packing.enabled", True),
        ("generation.top_k", 5),
        ("generation.top_p", 0.9),
        (OVERLAP, True),
    ],
)
def test_the_guardrails_of_fused_logprobs_hold_without_a_recipe(make, key, value):
    tree = load_config("examples/configs/grpo_copy_cpu.yaml").policy.model_dump()
    section = tree
    *sections, last = key.split(".")
    for name in sections:
        section = section[name]
    section[last] = value
    with pytest.raises(ConfigError) as caught:
        make(PolicyConfig(**tree))
    (problem,) = [problem for problem in caught.value.problems if problem.path == FUSED]
    assert key in problem.related
