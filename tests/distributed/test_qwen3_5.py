"""Gated delta nets and gated attention are transformers' in float64, on every layout, packed or not."""

import json

import family_cases as cases
import hf_models
import hf_weight_cases
import pytest
import test_generation
import test_hybrid
import torch
from safetensors.torch import save_file
from tolerances import GRADIENTS_OF_DELTA_NETS

ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0}
DENSE = [layout for layout in cases.LAYOUTS if "ep2" not in layout]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(name)`: see `family_cases.saved_models`."""
    return cases.saved_models(tmp_path_factory, **ADAM)


@pytest.mark.smoke("qwen3.5-one-packed")
@pytest.mark.quick_cases("qwen3.5-one-padded", "qwen3.5-tp2-packed", "qwen3.5-moe-tp2-sp-ep2-packed")
@pytest.mark.parametrize("rows", cases.ROWS)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("qwen3.5", layout) for layout in DENSE),
        *(("qwen3.5-tied", layout) for layout in ("one", "tp2", "pp2")),
        *(("qwen3.5-moe", layout) for layout in cases.OF_EXPERTS),
    ],
)
def test_log_probabilities_and_gradients(ranks, saved, name, layout, rows):
    cases.assert_a_pass_is_theirs(ranks, saved(name), layout, rows, within=GRADIENTS_OF_DELTA_NETS)


MODEL = {
    "num_layers": 4,
    "qk_layernorm": True,
    "linear_attention_freq": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}


@pytest.mark.parametrize("layout", ["one", "tp2-sp"])
def test_decoding_says_what_a_pass_says(ranks, layout):
    """With states and keys of tokens before, and by whole passes where the layout has none."""
    lengths = [10, 10, 2, 5, 2, 1, 5, 3]
    test_generation.assert_confirmed(ranks, *cases.LAYOUTS[layout], lengths, model=MODEL)


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2"])
def test_a_checkpoint_goes_on_in_another_layout(ranks, tmp_path, layout):
    needed, megatron = cases.LAYOUTS[layout]
    (wanted,) = ranks(1).run(test_hybrid.go_on, "auto", str(tmp_path / "step"), MODEL, {}, False)
    for found in ranks(needed).run(test_hybrid.go_on, "auto", str(tmp_path / "step"), MODEL, megatron, True):
        test_hybrid.assert_went_on_alike(found, wanted)


def as_published(folder, to):
    """The folder of a model that also sees images: with a nested config.json, and with experts in one tensor."""
    config = json.loads((folder / "config.json").read_text())
    nested = {"model_type": "qwen3_5_moe", "text_config": config, "vision_config": {}}
    (to / "config.json").write_text(json.dumps(nested))
    published = {"model.visual.merger.norm.weight": torch.ones(3), "mtp.norm.weight": torch.ones(48)}
    stacks = {}
    for name, tensor in hf_models.tensors(folder).items():
        before, apart, after = name.partition(".experts.")
        if apart:
            expert, part = after.split(".")[:2]
            stacks.setdefault(f"{before}.experts.", {})[int(expert), part] = tensor
        else:
            published[name] = tensor
    for name, parts in stacks.items():
        gate, up, down = (
            torch.stack([parts[expert, part] for expert in range(4)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        published |= {f"{name}gate_up_proj": torch.cat([gate, up], dim=1), f"{name}down_proj": down}
    save_file(published, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_a_published_folder_is_its_language_model(ranks, saved, tmp_path):
    folder, _, _ = saved("qwen3.5-moe")
    ids = cases.batch()["input_ids"], cases.batch()["input_lengths"]
    published = as_published(folder, tmp_path)
    found, wanted = (
        ranks(2).run(hf_weight_cases.loaded_logprobs, one, cases.EP2, *ids) for one in (published, folder)
    )
    for (own, exported), (theirs, tensors) in zip(found, wanted, strict=True):
        assert (own == theirs).all()
        assert exported.keys() == tensors.keys()
        assert all((exported[name] == tensor).all() for name, tensor in tensors.items())
