"""Numbers of four bits are read as transformers reads them."""

import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nemo_rl_mcore.rank.megatron.hf_weights.files import TensorFiles, dequantized


def quantized():
    """Blocks of three experts with five outputs and 64 inputs, with every code, and scales far from 1."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(97, 157, (3, 5, 2), generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_numbers_are_those_of_transformers():
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
