"""The driver's handle before any engine runs."""

import pytest
import torch

from nemo_rl_mcore.config import ClusterConfig, PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.generation.vllm.engine import WrongWeightsError
from nemo_rl_mcore.workers.cluster import Placement, RayCluster
from nemo_rl_mcore.workers.vllm_generation import VllmGeneration


class NoWeights:
    placement = Placement(())

    def gpus(self):
        return ()

    def connect_engines(self, engines, settings):
        return None

    def send_weights(self):
        return 0


def generation(folder):
    config = PolicyConfig.model_validate(
        {
            "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 32},
            "tokenizer": {"name": "char"},
            "train_global_batch_size": 8,
            "train_micro_batch_size": 8,
            "max_total_sequence_length": 16,
            "megatron_cfg": {"optimizer": {"lr": 1e-3}},
            "generation": {"backend": "vllm", "max_new_tokens": 6},
        }
    )
    cluster = RayCluster(ClusterConfig())
    return VllmGeneration(config, cluster, NoWeights(), folder=folder, stop_ids=(7,), seed=3)


def prompts(*lengths):
    rows = torch.arange(len(lengths))
    return BatchedDataDict(
        input_ids=torch.ones(len(lengths), max(lengths), dtype=torch.long),
        input_lengths=torch.tensor(lengths),
        prompt_index=rows,
        sample_index=torch.zeros_like(rows),
    )


def test_a_prompt_that_leaves_no_room_for_a_response_is_refused_as_by_the_training_model(tmp_path):
    """vLLM alone would cut the response short at the longest sequence, and say that it did not finish."""
    with pytest.raises(
        ValueError, match=r"row 1 has a prompt of 11 tokens.* 6 takes to 17, past .*_length: 16"
    ):
        generation(tmp_path).generate(prompts(10, 11), step=1)
    with pytest.raises(WrongWeightsError, match="call update_weights first"):
        generation(tmp_path).generate(prompts(10, 10), step=1)
