"""The table of weights by itself: names of both layer implementations, cuts and packings, files."""

import json
import os

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nemo_rl_mcore.config import ModelConfig
from nemo_rl_mcore.models import all_weights, count_parameters
from nemo_rl_mcore.models.weights import COLUMNS, GATED, QKV, REPLICATED, ROWS
from nemo_rl_mcore.rank.megatron.hf_weights.files import (
    INDEX,
    ShardWriter,
    TensorFiles,
    dequantized,
    find_weight,
    pack,
    whole,
)

SIZES = {
    "num_layers": 3,
    "hidden_size": 12,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 4,
    "ffn_hidden_size": 20,
    "vocab_size": 7,
}


def model_of(**keys):
    return ModelConfig.model_validate(SIZES | keys)


DENSE = model_of(add_qkv_bias=True, qk_layernorm=True)
EXPERTS = model_of(qk_layernorm=True, num_moe_experts=4, moe_ffn_hidden_size=8)
BIASED = model_of(num_moe_experts=4, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
TIED = model_of(tie_word_embeddings=True)

ATTENTION = {
    **{
        f"self_attention.linear_qkv.{kind}": [f"self_attn.{part}_proj.{kind}" for part in "qkv"]
        for kind in ("weight", "bias")
    },
    "self_attention.linear_proj.weight": ["self_attn.o_proj.weight"],
    "self_attention.q_layernorm.weight": ["self_attn.q_norm.weight"],
    "self_attention.k_layernorm.weight": ["self_attn.k_norm.weight"],
}
DENSE_FEED_FORWARD = {
    "mlp.linear_fc1.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.linear_fc2.weight": ["mlp.down_proj.weight"],
}
LOCAL = {
    "input_layernorm.weight": ["input_layernorm.weight"],
    "pre_mlp_layernorm.weight": ["post_attention_layernorm.weight"],
}
TRANSFORMER_ENGINE = {
    "self_attention.linear_qkv.layer_norm_weight": ["input_layernorm.weight"],
    "mlp.linear_fc1.layer_norm_weight": ["post_attention_layernorm.weight"],
}


@pytest.mark.parametrize("norms", [LOCAL, TRANSFORMER_ENGINE], ids=["local", "transformer-engine"])
def test_names_in_a_dense_layer(norms):
    for name, tensors in (ATTENTION | DENSE_FEED_FORWARD | norms).items():
        weight = find_weight(f"decoder.layers.1.{name}", [4, 5], 0, DENSE)
        assert weight.names == tuple(f"model.layers.5.{tensor}" for tensor in tensors)
        assert len(weight.slot.shapes(DENSE)) == len(tensors)


@pytest.mark.parametrize(
    "name",
    ["mlp.experts.local_experts.1.linear_fc{}.weight", "mlp.experts.linear_fc{}.weight1"],
    ids=["one-by-one", "grouped"],
)
def test_names_of_experts_count_on_from_the_ranks_first(name):
    up = find_weight(f"decoder.layers.0.{name.format(1)}", [2], 2, EXPERTS)
    assert up.names == (
        "model.layers.2.mlp.experts.3.gate_proj.weight",
        "model.layers.2.mlp.experts.3.up_proj.weight",
    )
    down = find_weight(f"decoder.layers.0.{name.format(2)}", [2], 2, EXPERTS)
    assert down.names == ("model.layers.2.mlp.experts.3.down_proj.weight",)
    router = find_weight("decoder.layers.0.mlp.router.weight", [2], 2, EXPERTS)
    assert (router.names, router.slot.shapes(EXPERTS)) == (("model.layers.2.mlp.gate.weight",), ((4, 12),))
    bias = find_weight("decoder.layers.0.mlp.router.expert_bias", [2], 2, BIASED)
    assert (bias.names, bias.slot.shapes(BIASED)) == (
        ("model.layers.2.mlp.gate.e_score_correction_bias",),
        ((4,),),
    )


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.0.eh_proj.weight",
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
        "value_head.weight",
    ],
)
def test_parameters_without_a_counterpart_are_named(name):
    with refused("unknown-parameter", f"'{name}'"):
        find_weight(name, [0], 0, DENSE)


@pytest.mark.parametrize("model", [DENSE, EXPERTS, BIASED, TIED], ids=["dense", "experts", "biased", "tied"])
def test_all_weights_add_up_to_the_model(model):
    names = [name for weight in all_weights(model) for name in weight.names]
    shapes = [shape for weight in all_weights(model) for shape in weight.slot.shapes(model)]
    assert len(set(names)) == len(names) == len(shapes)
    assert sum(torch.Size(shape).numel() for shape in shapes) == count_parameters(model)
    assert ("lm_head.weight" in names) == (not model.tie_word_embeddings)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        (REPLICATED, [(5,)]),
        (ROWS, [(7, 3)]),
        (COLUMNS, [(3, 8)]),
        (GATED, [(8, 3), (8, 3)]),
        (QKV, [(32, 3), (16, 3), (16, 3)]),
    ],
    ids=["replicated", "vocabulary", "columns", "gated", "qkv"],
)
def test_the_parts_of_all_ranks_are_the_whole(layout, shapes, ranks):
    model = model_of(num_attention_heads=8, num_query_groups=4)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    shards = []
    for rank in range(ranks):
        parts = [tensor[layout.cuts(tensor.shape, rank, ranks, DENSE)[0]] for tensor in tensors]
        shard = pack(layout.packing, parts, model)
        if layout is ROWS:  # the last rank's parameter has rows of padding
            shard = torch.nn.functional.pad(shard, (0, 0, 0, -(-7 // ranks) - shard.shape[0]), value=9.0)
        shards.append(shard)
    assert len({shard.shape for shard in shards}) == 1
    for found, wanted in zip(whole(layout, shards, shapes, model), tensors, strict=True):
        assert torch.equal(found, wanted)


def written(folder, tensors, shard_bytes):
    writer = ShardWriter(folder, {name: tensor.nbytes for name, tensor in tensors.items()}, shard_bytes)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    return writer


def test_shards_stay_within_the_budget_and_are_indexed(tmp_path):
    tensors = {f"t{number}": torch.full((number + 1,), float(number)) for number in range(6)}
    written(tmp_path, tensors, 24).close()
    files = sorted(tmp_path.glob("*.safetensors"))
    held = [sorted(load_file(file)) for file in files]
    assert held == [["t0", "t1", "t2"], ["t3"], ["t4"], ["t5"]]
    assert files[0].name == "model-00001-of-00004.safetensors"
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    with TensorFiles(tmp_path) as found:
        assert found.names == tensors.keys()
        assert all(torch.equal(found.read(name, (slice(None),)), tensor) for name, tensor in tensors.items())


def test_a_tensor_that_does_not_come_is_missed(tmp_path):
    writer = ShardWriter(tmp_path, {"a": 8, "b": 8}, 100)
    writer.add("a", torch.zeros(2))
    with refused("missing-tensors", ["a", "b"]):
        writer.close()


def test_writing_does_not_alias_what_is_written(tmp_path):
    writer, tensor = ShardWriter(tmp_path, {"a": 8, "b": 8}, 100), torch.zeros(2)
    writer.add("a", tensor)
    tensor.fill_(1.0)
    writer.add("b", tensor)
    writer.close()
    assert load_file(tmp_path / "model.safetensors")["a"].tolist() == [0.0, 0.0]


def test_folders_without_readable_weights_say_why(tmp_path):
    with refused("no-weights", tmp_path, "model.safetensors", INDEX):
        TensorFiles(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345678not a header")
    with refused("unreadable-file", "model.safetensors"):
        TensorFiles(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with refused("no-index", INDEX):
        TensorFiles(tmp_path)
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"a": "gone.safetensors", "b": "there.safetensors"}})
    )
    save_file({"c": torch.zeros(1)}, tmp_path / "there.safetensors")
    with TensorFiles(tmp_path) as files:
        with refused("unreadable-file", "gone.safetensors"):
            files.read("a", (slice(None),))
        with refused("missing-tensors", "there.safetensors", " b:"):
            files.read("b", (slice(None),))


def indexed(folder, file):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    return folder


def test_neither_an_index_nor_a_link_leads_out_of_the_folder(tmp_path):
    outside, folder = tmp_path / "outside.safetensors", tmp_path / "model"
    save_file({"a": torch.ones(1)}, outside)
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(outside)
    with refused("outside-folder", outside):
        TensorFiles(folder)
    for file in ("../outside.safetensors", str(outside), "model.safetensors"):
        with refused("outside-folder", outside):
            TensorFiles(indexed(folder, file))


def test_a_snapshot_of_the_hub_is_read_through_its_links(tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(1)}, blobs / "beef")
    (snapshot / "model.safetensors").symlink_to("../../blobs/beef")
    with TensorFiles(snapshot) as files:
        assert files.read("a", (slice(None),)).tolist() == [1.0]
    (snapshot / "model.safetensors").unlink()
    (snapshot / "part.safetensors").symlink_to("../../blobs/beef")
    with TensorFiles(indexed(snapshot, "part.safetensors")) as files:
        assert files.read("a", (slice(None),)).tolist() == [1.0]


def test_a_pipe_among_the_weights_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "part.safetensors")
    with refused("not-a-regular-file", "part.safetensors"):
        TensorFiles(indexed(tmp_path, "part.safetensors"))


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("[" * 100_000, INDEX),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a'"),
        ('{"weight_map": {"a": 5}}', "weight_map.a"),
        ('{"weight_map": []}', "weight_map"),
    ],
)
def test_what_is_wrong_with_an_index_is_said(tmp_path, content, part):
    (tmp_path / INDEX).write_text(content)
    with refused("no-index", part):
        TensorFiles(tmp_path)


# Numbers of four bits


def quantized():
    """Blocks of three experts with five outputs and 64 inputs, with every code, and scales far from 1."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(97, 157, (3, 5, 2), generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_numbers_of_four_bits_are_those_of_transformers():
    blocks, scales = quantized()
    wanted = convert_moe_packed_tensors(blocks, scales)
    found = dequantized(blocks, scales)
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert found.shape == (3, 64, 5)
    assert torch.equal(found, wanted)


def test_a_file_holds_the_one_tensor_that_blocks_and_scales_make(tmp_path):
    blocks, scales = quantized()
    name, bias = "model.layers.0.mlp.experts.down_proj", torch.ones(3, 5)
    packed = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": bias}
    save_file(packed, tmp_path / "model.safetensors")
    with TensorFiles(tmp_path) as files:
        assert files.names == {name, f"{name}_bias"}
        assert files.shape(name) == (3, 64, 5)
        assert files.shape(f"{name}_bias") == (3, 5)
        found = files.read(name, (slice(1, 2), slice(0, 64), slice(2, 5)))
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales)[1:2, :, 2:])
