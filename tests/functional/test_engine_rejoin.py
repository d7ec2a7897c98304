"""An engine that dies while real ranks have a step open gets the published weights; the step is not disturbed."""

from dataclasses import dataclass

import pytest
import torch
from fake_generation import engine_of, kill, until

from nemo_rl_mcore.config import ClippedPGLossConfig, ClusterConfig, PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.engine_generation import EngineGeneration
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.engine.kinds import embedded_kind
from nemo_rl_mcore.losses import ClippedPGLossFn

LOSS = ClippedPGLossFn(
    ClippedPGLossConfig.model_validate({"reference_policy_kl_penalty": 0.0, "force_on_policy_ratio": True})
)


def policy_config(overlapped):
    return PolicyConfig.model_validate(
        {
            "model": {
                "num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "ffn_hidden_size": 128, "vocab_size": 32,
                "init_method_std": 0.2,
            },
            "tokenizer": {"name": "char"},
            "train_global_batch_size": 8,
            "train_micro_batch_size": 2,
            "max_total_sequence_length": 32,
            "megatron_cfg": {
                "optimizer": {"lr": 3e-2, "weight_decay": 0.0, "use_distributed_optimizer": True},
                "distributed_data_parallel_config": {
                    "overlap_grad_reduce": overlapped, "overlap_param_gather": overlapped,
                },
            },
            "generation": {
                "backend": "embedded", "max_new_tokens": 12, "colocated": {"enabled": False},
                "engines": 1, "max_restarts": 1,
            },
        }
    )  # fmt: skip


def chunk(seed):
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.full((4, 10), -3.0)
    return BatchedDataDict(
        input_ids=torch.randint(0, 32, (4, 10), generator=generator),
        input_lengths=torch.full((4,), 10),
        token_mask=torch.ones(4, 10),
        sample_mask=torch.ones(4),
        advantages=torch.randn(4, 10, generator=generator),
        prev_logprobs=uniform,
        generation_logprobs=uniform,
    )


@dataclass
class Found:
    """Digests of the weights after each step, of what the engine was given, and its answers."""

    trained: list[str]
    given: list[str]
    answers: list[list[list[int]]]


def two_steps(cluster, config, disturb):
    """disturb: called with the engines inside the second step, between its chunks."""
    asked = BatchedDataDict(
        input_ids=torch.arange(12).view(3, 4),
        input_lengths=torch.tensor([4, 3, 2]),
        prompt_index=torch.arange(3),
        sample_index=torch.zeros(3, dtype=torch.long),
    )
    found = Found([], [], [])
    with (
        Policy(config, cluster, seed=3) as policy,
        EngineGeneration(embedded_kind(config), config, cluster, policy, stop_ids=(), seed=3) as engines,
    ):
        for step in (1, 2):
            engines.update_weights(step - 1)
            policy.begin_train_step(LOSS, step_id=f"{step}")
            policy.train_microbatch(chunk(2 * step), chunk_id="first")
            if step == 2:
                disturb(engines)
            found.given.append(engines.weights_digest)
            found.answers.append(engines.generate(asked, step=5)["tokens"].tolist())
            policy.train_microbatch(chunk(2 * step + 1), chunk_id="second")
            policy.finish_train_step()
            found.trained.append(policy.weights_digest())
    return found


def loses_its_engine(engines):
    lost = kill(engines, 0)
    until(lambda: not engines._fleet.run(engines._fleet.live, "health"))
    assert not engines.answering
    until(lambda: engines.joining)
    engines.rejoin()
    assert engine_of(engines, 0) is not lost
    assert engines.answering


@pytest.mark.exhaustive_cases("False")
@pytest.mark.parametrize("overlapped", [False, True])
def test_the_engine_gets_the_published_weights_and_the_step_is_not_disturbed(overlapped):
    config = policy_config(overlapped)
    with RayCluster(ClusterConfig(cpu_workers_per_node=2)) as cluster:
        expected = two_steps(cluster, config, lambda engines: None)
        found = two_steps(cluster, config, loses_its_engine)
    assert found == expected
    assert found.given[1] == found.trained[0] != found.trained[1]
    assert found.answers[0] != found.answers[1], "the weights have changed"
