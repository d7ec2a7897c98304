"""Hugging Face weights into every layout and out again: transformers' log-probabilities, and the tensors bit for bit."""


import hf_models
import numpy as np
import pytest
import torch

TOLERANCE = 1e-4
ROWS, LENGTH = 4, 40
PP2 = {"pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
TP2_SP = {**TP2, "sequence_parallel": True}
VPP = {**PP2, "virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
TWO_RANKS = {"tp2": TP2, "tp2-sp": TP2_SP, "pp2": PP2, "pp2-vpp2": VPP}
TWO_RANKS_OF_EXPERTS = {"ep2": EP2, "tp2-sp": TP2_SP, "tp2-sp-ep2": TP2_SP | EP2, "pp2": PP2}
DENSE = [name for name in hf_models.MODELS if "moe" not in name]
MOE = [name for name in hf_models.MODELS if "moe" in name]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(name)`: the folder of a tiny model and the log-probabilities that transformers gives the batch."""
    found = {}

    def folder_and_logprobs(name):
        if name not in found:
            folder = hf_models.save(name, tmp_path_factory.mktemp(name))
            found[name] = folder, hf_models.logprobs(folder, *batch())
        return found[name]

    return folder_and_logprobs


def batch():
    generator = np.random.default_rng(5)
    return generator.integers(0, hf_models.VOCABULARY, (ROWS, LENGTH)), np.array([LENGTH, 7, LENGTH, 31])


def policy_of(folder, megatron, **policy):
    from nemo_rl_mcore.config import PolicyConfig

    sections = {
        "model_name": str(folder),
        "tokenizer": {"name": "char"},
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "max_total_sequence_length": LENGTH,
        "generation": {"max_new_tokens": 4, "temperature": 1.0},
        "megatron_cfg": {"optimizer": {"lr": 1e-2, "weight_decay": 0.0}} | megatron,
    }
    return PolicyConfig.model_validate(sections | policy)


def loaded_logprobs(folder, megatron, ids, lengths, policy=None):
    import tiny

    worker = tiny.worker(policy_of(folder, megatron, **(policy or {})))
    data = tiny.BatchedDataDict(input_ids=torch.from_numpy(ids), input_lengths=torch.from_numpy(lengths))
    found = worker.get_logprobs(data=data)["logprobs"].numpy()
    exported = {name: tensor.clone() for name, tensor in full_tensors_of(worker)}
    return found, {name: as_bits(tensor) for name, tensor in exported.items()}


def full_tensors_of(worker):
    from nemo_rl_mcore.megatron.hf_weights.export import full_tensors

    return full_tensors(worker.backend.chunks, worker.policy)


def as_bits(tensor):
    """A numpy array that tells bit patterns apart; numpy knows no bfloat16."""

    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32).numpy()


def assert_equal_tensors(found, folder):
    wanted = {name: as_bits(tensor) for name, tensor in hf_models.tensors(folder).items()}
    assert found.keys() == wanted.keys()
    for name, bits in wanted.items():
        assert found[name].shape == bits.shape, name
        assert (found[name] == bits).all(), name


def assert_loads(ranks, world_size, megatron, folder, logprobs):
    for found, exported in ranks(world_size).run(loaded_logprobs, folder, megatron, *batch()):
        assert np.abs(found - logprobs).max() < TOLERANCE
        assert_equal_tensors(exported, folder)


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_one_rank_computes_what_transformers_computes(ranks, saved, name):
    folder, logprobs = saved(name)
    assert np.abs(logprobs).max() > 5
    assert_loads(ranks, 1, {}, folder, logprobs)


@pytest.mark.parametrize("layout", TWO_RANKS)
@pytest.mark.parametrize("name", DENSE)
def test_layouts_of_dense_models(ranks, saved, name, layout):
    assert_loads(ranks, 2, TWO_RANKS[layout], *saved(name))


@pytest.mark.parametrize("layout", TWO_RANKS_OF_EXPERTS)
@pytest.mark.parametrize("name", MOE)
def test_layouts_of_models_with_experts(ranks, saved, name, layout):
    assert_loads(ranks, 2, TWO_RANKS_OF_EXPERTS[layout], *saved(name))
