"""Hugging Face weights into every layout and out again: transformers' log-probabilities, the tensors bit for bit."""

import json
import shutil

import hf_models
import hf_weight_cases as cases
import numpy as np
import pytest
import torch
from rank_pool import RankFailedError
from refusals import assert_holds
from safetensors.torch import save_file

TOLERANCE = 1e-4
ROWS = 4
PP2 = {"pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
TP2_SP = {**TP2, "sequence_parallel": True}
VPP = {**PP2, "virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
UNEVEN = {**PP2, "num_layers_in_last_pipeline_stage": 1}
CP2 = {"context_parallel_size": 2}
HYBRID = {"model_class": "hybrid"}
TWO_RANKS = {
    **{"tp2": TP2, "tp2-sp": TP2_SP, "pp2": PP2, "pp2-vpp2": VPP, "pp2-uneven": UNEVEN, "cp2": CP2},
    "hybrid-pp2-uneven": HYBRID | UNEVEN,
}
TWO_RANKS_OF_EXPERTS = {
    **{"ep2": EP2, "tp2-sp": TP2_SP, "tp2-sp-ep2": TP2_SP | EP2, "pp2": PP2},
    "cp2-ep2": CP2 | EP2,
    "hybrid-tp2-sp-ep2": HYBRID | TP2_SP | EP2,
}
# One of each structure: the others have the same parameters, or the same with one left out.
DENSE = ["llama", "llama-tied", "llama3-32", "mistral", "qwen2-tied", "qwen2-yarn", "qwen3", "one-group"]
MOE = ["qwen3-moe", "qwen3-moe-shares", "mixtral"]


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
    ids = generator.integers(0, hf_models.VOCABULARY, (ROWS, cases.LENGTH))
    return ids, np.array([cases.LENGTH, 7, cases.LENGTH, 31])


def assert_equal_tensors(found, folder):
    tensors = hf_models.tensors(folder).items()
    # Of shared experts that a model does not have transformers writes tensors without an entry.
    wanted = {name: cases.as_bits(tensor) for name, tensor in tensors if tensor.numel()}
    assert found.keys() == wanted.keys()
    for name, bits in wanted.items():
        assert found[name].shape == bits.shape, name
        assert (found[name] == bits).all(), name


def assert_loads(ranks, world_size, megatron, folder, logprobs):
    for found, exported in ranks(world_size).run(cases.loaded_logprobs, folder, megatron, *batch()):
        assert np.abs(found - logprobs).max() < TOLERANCE
        assert_equal_tensors(exported, folder)


@pytest.mark.smoke("qwen2")
@pytest.mark.parametrize("name", hf_models.MODELS)
def test_one_rank_computes_what_transformers_computes(ranks, saved, name):
    folder, logprobs = saved(name)
    assert np.abs(logprobs).max() > 5
    assert_loads(ranks, 1, {}, folder, logprobs)


@pytest.mark.each_value
@pytest.mark.parametrize("layout", TWO_RANKS)
@pytest.mark.parametrize("name", DENSE)
def test_layouts_of_dense_models(ranks, saved, name, layout):
    assert_loads(ranks, 2, TWO_RANKS[layout], *saved(name))


@pytest.mark.each_value
@pytest.mark.parametrize("layout", TWO_RANKS_OF_EXPERTS)
@pytest.mark.parametrize("name", MOE)
def test_layouts_of_models_with_experts(ranks, saved, name, layout):
    assert_loads(ranks, 2, TWO_RANKS_OF_EXPERTS[layout], *saved(name))


def test_stretched_frequencies_reach_the_logprobs(saved, tmp_path):
    for name in ("llama3-8192", "llama3-32"):
        folder, logprobs = saved(name)
        plain = shutil.copytree(folder, tmp_path / name)
        hf_models.set_in_config(plain, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
        assert np.abs(hf_models.logprobs(plain, *batch()) - logprobs).max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "megatron"),
    [
        ("mistral", TP2),
        ("llama3-32", PP2),
        ("qwen2-tied", VPP),
        ("qwen2-yarn", CP2),
        ("qwen3-moe", UNEVEN),
        ("qwen3", TP2_SP),
        ("qwen3-moe", TP2_SP | EP2),
        ("qwen3-moe-shares", EP2),
        ("mixtral", EP2),
        ("qwen2-tied", HYBRID | VPP),
        ("qwen3-moe", HYBRID | PP2),
        ("qwen3.5", TP2),
        ("qwen3.5-moe", TP2_SP | EP2),
    ],
)
def test_a_written_folder_is_the_one_that_was_read(ranks, saved, tmp_path, name, megatron):
    folder, logprobs = saved(name)
    output = tmp_path / "exported"
    ranks(2).run(cases.saved_again, folder, megatron, output, 40_000)
    assert len([*output.glob("model-*-of-*.safetensors")]) > 1
    assert all(file.stat().st_size < 60_000 for file in output.glob("*.safetensors"))
    assert_equal_tensors(
        {key: cases.as_bits(tensor) for key, tensor in hf_models.tensors(output).items()}, folder
    )
    assert (hf_models.logprobs(output, *batch()) == logprobs).all()
    before, after = (json.loads((at / "config.json").read_text()) for at in (folder, output))
    assert after["model_type"] == before["model_type"]
    assert (after["eos_token_id"], after["pad_token_id"]) == (before["eos_token_id"] or 15, 16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported"]


def test_a_written_folder_has_the_tokenizer_and_ends_answers_where_training_did(ranks, saved, tmp_path):
    from transformers import AutoTokenizer

    start = shutil.copytree(saved("llama")[0], tmp_path / "start")
    hf_models.set_in_config(start, eos_token_id=15)
    (start / "generation_config.json").write_text('{"eos_token_id": 3, "temperature": 0.6}')
    ranks(1).run(cases.saved_again, start, {}, tmp_path / "exported", 10**9)
    written = json.loads((tmp_path / "exported/generation_config.json").read_text())
    assert written == {"eos_token_id": [15, 3], "temperature": 0.6}
    assert (tmp_path / "exported/model.safetensors").is_file()
    assert AutoTokenizer.from_pretrained(tmp_path / "exported")("527>").input_ids == [5, 2, 7, 12]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16_weights_and_their_fp32_copies(ranks, tmp_path, dtype):
    folder = hf_models.save("qwen2", tmp_path / "model", dtype)
    plain = {"optimizer": {"lr": 1e-2, "weight_decay": 0.0, "use_distributed_optimizer": False}}
    wanted = {name: cases.as_bits(tensor.bfloat16()) for name, tensor in hf_models.tensors(folder).items()}
    for exported, copies, weights in ranks(2).run(cases.weights_in_bf16, folder, TP2 | plain):
        assert exported.keys() == wanted.keys()
        assert all((exported[name] == bits).all() for name, bits in wanted.items())
        assert copies == pytest.approx(weights, rel=1e-6)


def test_export_gathers_weights_that_are_still_to_come(ranks, saved):
    folder, _ = saved("qwen3")
    plain, overlapped = (ranks(2).run(cases.trained_then_exported, folder, flag) for flag in (False, True))
    loaded = hf_models.tensors(folder)
    for (exported, reference), (other, other_reference) in zip(plain, overlapped, strict=True):
        assert all((exported[name] == other[name]).all() for name in exported)
        assert (reference == other_reference).all()
        assert any((exported[name] != cases.as_bits(tensor)).any() for name, tensor in loaded.items())


@pytest.mark.parametrize("megatron", [{}, TP2, PP2, EP2, TP2_SP | EP2], ids=str)
def test_a_rank_reads_its_own_parts_only(ranks, saved, megatron):
    folder, _ = saved("qwen3-moe" if "expert_model_parallel_size" in megatron else "qwen3")
    whole = {name: tensor.nbytes for name, tensor in hf_models.tensors(folder).items()}
    reports = ranks(2 if megatron else 1).run(cases.parts_read, folder, megatron)
    padding = 48 * 4  # a row of the embedding and one of the output layer, at most
    for read, parameters in reports:
        assert parameters - 2 * padding <= sum(read.values()) <= parameters
    for name, size in whole.items():
        if "norm" not in name and "mlp.gate." not in name and megatron not in ({}, EP2):
            assert sum(read.get(name, 0) for read, _ in reports) == size, name
        assert max(read.get(name, 0) for read, _ in reports) <= size


def changed(folder, to, change):
    """A copy of a model's folder with other tensors; change: to what, None to leave it out, or what is done to it."""
    shutil.copytree(folder, to)
    tensors = hf_models.tensors(to)
    for name, value in change.items():
        tensors[name] = value(tensors) if callable(value) else value
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        to / "model.safetensors",
        metadata={"format": "pt"},
    )
    return to


def spoiled(name, value, place=(-1, -1)):
    """A tensor with another number somewhere."""

    def change(tensors):
        tensors[name][place] = value
        return tensors[name]

    return {name: change}


def like_embedding(more=0.0):
    """An output layer, of which the last number is more than that of the embedding."""

    def change(tensors):
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += more
        return head

    return {"lm_head.weight": change}


UP, EXPERT = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.experts.3.down_proj.weight"
BEHIND = {"model.layers.4.eh_proj.weight": torch.ones(48, 96)}
"""A prediction layer, of those that come after the others."""


@pytest.mark.parametrize(
    ("name", "change", "parts"),
    [
        ("llama", spoiled(UP, torch.nan), ("changed/model.safetensors", UP, "nan")),
        (
            "llama-tied",
            spoiled("model.embed_tokens.weight", torch.inf, (-1, 0)),
            ("changed/model.safetensors", "model.embed_tokens.weight", "inf"),
        ),
        ("qwen3-moe", spoiled(EXPERT, -torch.inf, (0, 0)), ("changed/model.safetensors", EXPERT)),
        ("llama", {UP: None, "model.norm.weight": None}, (f"2 missing: {UP}, model.norm.weight",)),
        (
            "llama",
            {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)},
            ("1 unexpected: model.layers.0.self_attn.q_proj.bias",),
        ),
        ("llama", BEHIND, ("1 unexpected: model.layers.4.eh_proj.weight",)),
        ("nemotron-h", BEHIND, ("1 unexpected: model.layers.4.eh_proj.weight",)),
        (
            "llama",
            {"model.layers.3.mlp.down_proj.weight": torch.zeros(48, 96)},
            ("model.layers.3.mlp.down_proj.weight", "(48, 96)", "(48, 80)"),
        ),
        ("llama", {"model.norm.weight": torch.ones(48, dtype=torch.int32)}, ("model.norm.weight", "I32")),
        ("llama-tied", like_embedding(1.0), ("lm_head.weight", "model.embed_tokens.weight")),
    ],
)
def test_tensors_that_are_not_the_models_are_named(ranks, saved, tmp_path, name, change, parts):
    folder = changed(saved(name)[0], tmp_path / "changed", change)
    with pytest.raises(RankFailedError) as caught:
        ranks(1).run(cases.loaded_logprobs, folder, {}, *batch())
    assert_holds(str(caught.value), *parts)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}),
        ("llama-tied", like_embedding()),
        ("deepseek-v3", BEHIND),
        ("nemotron-h-latent", {"mtp.layers.0.eh_proj.weight": torch.ones(48, 96)}),
    ],
)
def test_redundant_tensors_are_left(ranks, saved, tmp_path, name, change):
    folder = changed(saved(name)[0], tmp_path / "changed", change)
    ((found, _),) = ranks(1).run(cases.loaded_logprobs, folder, {}, *batch())
    assert np.abs(found - saved(name)[1]).max() < TOLERANCE


def test_a_config_that_is_no_longer_the_recipes_is_refused(ranks, saved, tmp_path):
    folder = shutil.copytree(saved("llama")[0], tmp_path / "changed")
    with pytest.raises(RankFailedError, match=r"policy.model.layernorm_epsilon: 1e-06 .* 0.001"):
        ranks(1).run(cases.load_after_a_change, folder)
