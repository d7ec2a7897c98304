"""Adapters beside Megatron's linear layers: peft's numbers on every layout, and nothing else moves."""

import re
import warnings
from unittest import mock

import hf_models
import hf_weight_cases as cases
import lora_cases
import numpy as np
import pytest
import torch
from rank_pool import RankFailedError
from safetensors.torch import save_file
from tolerances import GRADIENTS, LOGPROBS

pytestmark = pytest.mark.needs("test-oracle")

TP2 = {"tensor_model_parallel_size": 2}
TP2_SP = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP = {**PP2, "virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
DISTRIBUTED = {"optimizer": lora_cases.ADAM | {"use_distributed_optimizer": True}}
OVERLAPPED = {"distributed_data_parallel_config": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
FUSED = {"use_fused_linear_logprobs": True}
RECOMPUTED = {"activation_checkpointing": True}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}}
LAYOUTS = {
    "tp1": (1, {}, {}),
    "tp2": (2, TP2, {}),
    "tp2-sp": (2, TP2_SP, {}),
    "pp2": (2, PP2, {}),
    "pp2-vpp2": (2, VPP, {}),
    "cp2": (2, CP2, {}),
    "cp2-packed": (2, CP2, PACKED),
    "dp2-distributed": (2, DISTRIBUTED, {}),
    "dp2-overlapped": (2, DISTRIBUTED | OVERLAPPED, {}),
    "fused-recomputed": (1, FUSED | RECOMPUTED, {}),
    "tp2-sp-fused-recomputed": (2, TP2_SP | FUSED | RECOMPUTED, {}),
    "ep2": (2, EP2, {}),
    "tp2-sp-ep2": (2, TP2_SP | EP2, {}),
}
DENSE = [name for name in LAYOUTS if "ep2" not in name]
EXPERTS = ["tp1", "tp2-sp", "pp2", "cp2", "dp2-distributed", "ep2", "tp2-sp-ep2"]
LATENT = ["tp1", "tp2-sp"]
ADAM = {"lr": 5e-3, "weight_decay": 0.1, "eps": 1e-3}
OTHERS = re.compile(r"\.(k_proj|v_proj|up_proj)\.")
STEPS = 1e-5
"""Of an adapter's tensor after three steps."""


def batches():
    """Rows of 40, 7, 2 and 31 tokens, three times."""
    found = []
    for seed in range(3):
        generator = np.random.default_rng(seed)
        lengths, columns = np.array([cases.LENGTH, 7, 2, 31]), np.arange(cases.LENGTH)
        mask = (columns >= 1) & (columns < lengths[:, None])
        found.append(
            {
                "input_ids": generator.integers(0, hf_models.VOCABULARY, (len(lengths), cases.LENGTH)),
                "input_lengths": lengths,
                "token_mask": mask.astype(np.float32),
                "sample_mask": np.ones(len(lengths), np.float32),
            }
        )
    return found


def modules_of(names):
    return sorted({name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in names})


class Oracle:
    """peft's model in float64 with these adapters, where layers that are one in Megatron share their A."""

    def __init__(self, folder, start):
        import peft

        self.start = start
        modules = modules_of(start)
        self._experts = {m.rpartition(".experts.")[0] + ".experts" for m in modules if ".experts." in m}
        plain = [module for module in modules if ".experts." not in module]
        config = peft.LoraConfig(
            r=lora_cases.PEFT["dim"],
            lora_alpha=lora_cases.PEFT["alpha"],
            target_modules=plain,
            target_parameters=[
                f"{module}.{which}" for module in self._experts for which in ("gate_up_proj", "down_proj")
            ]
            or None,
        )
        # Of experts it would take what is said of dense layers.
        with mock.patch("peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers"):
            self.model = peft.get_peft_model(hf_models._float64(folder), config)
        self._of, layers = {}, dict(self.model.named_modules())
        with torch.no_grad():
            for module in plain:
                layer, first = layers[f"base_model.model.{module}"], self._first(module)
                if first != module:
                    shared = layers[f"base_model.model.{first}"]
                    layer.lora_A["default"].weight = shared.lora_A["default"].weight
                for which in ("lora_A", "lora_B"):
                    weight = getattr(layer, which)["default"].weight
                    name = f"base_model.model.{module}.{which}.weight"
                    weight.copy_(torch.from_numpy(start[name]))
                    self._of[name] = weight, ...
            for module in self._experts:
                for name, wrapper in layers.items():
                    of_module = name.startswith(f"base_model.model.{module}")
                    if of_module and getattr(wrapper, "parameter_name", None) is not None:
                        self._fill(module, wrapper)

    def _first(self, module):
        for other, first in (("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj")):
            if module.endswith(other):
                return module.removesuffix(other) + first
        return module

    def _fill(self, module, wrapper):
        """peft has the A of all experts in one tensor, one below the other, and the Bs with experts last."""
        a, b = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
        experts, rank = wrapper.num_experts, lora_cases.PEFT["dim"]
        parts = ["gate_proj", "up_proj"] if wrapper.parameter_name == "gate_up_proj" else ["down_proj"]
        for expert in range(experts):
            rows = b.shape[0] // len(parts)
            for number, part in enumerate(parts):
                name = f"base_model.model.{module}.{expert}.{part}"
                of_a, of_b = (
                    (slice(expert * rank, (expert + 1) * rank),),
                    (slice(number * rows, (number + 1) * rows), slice(expert, None, experts)),
                )
                for which, weight, place in (("lora_A", a, of_a), ("lora_B", b, of_b)):
                    weight[place] = torch.from_numpy(self.start[f"{name}.{which}.weight"]).double()
                    self._of[f"{name}.{which}.weight"] = weight, place

    def __call__(self, data):
        """Log-probabilities of the first batch, gradients there, and the adapters after a step of AdamW on each."""
        optimizer = torch.optim.AdamW((p for p in self.model.parameters() if p.requires_grad), **ADAM)
        said = gradients = None
        for batch in data:
            optimizer.zero_grad()
            found, loss = hf_models._loss(self.model, batch)
            loss.backward()
            if said is None:
                said = found.detach().numpy()
                gradients = self.read(lambda weight: weight.grad)
            optimizer.step()
        return said, gradients, self.read(lambda weight: weight.detach())

    def read(self, what):
        return {name: what(weight)[place].numpy().copy() for name, (weight, place) in self._of.items()}


@pytest.fixture(scope="module")
def oracle(ranks, tmp_path_factory):
    """`oracle(name, keys)`: the folder of a tiny model, its adapters at the start, and what peft makes of them."""
    found = {}

    def of(name, keys):
        place = name, str(keys)
        if place not in found:
            folder = hf_models.save(name, tmp_path_factory.mktemp(name))
            (start,) = ranks(1).run(lora_cases.start_of, folder, keys)
            found[place] = folder, start, Oracle(folder, start)(batches())
        return found[place]

    return of


@pytest.mark.parametrize(
    ("name", "layout", "keys"),
    [
        *((name, layout, {}) for name in ("llama-tied", "qwen2", "qwen3") for layout in DENSE),
        *(("qwen3-moe", layout, lora_cases.EVERY_LINEAR) for layout in EXPERTS),
        *(("deepseek-v3", layout, {}) for layout in LATENT),
        ("one-group", "tp2-sp", {}),
    ],
)
def test_log_probabilities_gradients_and_steps_are_those_of_peft(ranks, oracle, name, layout, keys):
    folder, start, (logprobs, gradients, stepped) = oracle(name, keys)
    world_size, megatron, policy = LAYOUTS[layout]
    results = ranks(world_size).run(lora_cases.trained, folder, megatron, keys, batches(), policy)
    for own_start, said, norm, own_gradients, own_stepped in results:
        assert own_start.keys() == start.keys()
        assert all((own_start[tensor] == values).all() for tensor, values in start.items())
        assert abs(said - logprobs).max() < LOGPROBS
        # Every tensor once: a shared A is of the first of its projections.
        once = {n: values for n, values in gradients.items() if "lora_B" in n or not OTHERS.search(n)}
        assert norm == pytest.approx(sum((values**2).sum() for values in once.values()) ** 0.5, rel=1e-5)
        assert own_stepped.keys() == stepped.keys()
        for tensor, gradient in own_gradients.items():
            largest = abs(gradients[tensor]).max()
            assert largest > 1e-5, tensor
            assert abs(gradient - gradients[tensor]).max() < GRADIENTS * largest, tensor
        for tensor, values in stepped.items():
            assert abs(values - start[tensor]).max() > 1e-4, tensor
            assert abs(own_stepped[tensor] - values).max() < STEPS, tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hf_models.save("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.mark.parametrize(
    ("megatron", "position"),
    [({}, "pre"), (TP2, "pre"), (TP2_SP, "post"), (PP2, "post"), (DISTRIBUTED, "post")],
    ids=["tp1", "tp2", "tp2-sp", "pp2", "dp2"],
)
def test_train_is_the_split_step_and_abort_leaves_no_trace(ranks, folder, megatron, position):
    given = folder, megatron, position, batches()[0]
    for found in ranks(2 if megatron else 1).run(lora_cases.split_and_aborted, *given):
        assert found == (True, [], [])


@pytest.mark.parametrize("megatron", [{}, TP2_SP, PP2], ids=["tp1", "tp2-sp", "pp2"])
def test_the_reference_is_the_base_bit_for_bit(ranks, folder, megatron):
    for found in ranks(2 if megatron else 1).run(lora_cases.reference, folder, megatron, batches()[0]):
        assert found == (True, True, True)


def test_nothing_is_kept_of_the_base_but_its_weights(ranks, folder):
    for trained, all_, gradients, states in ranks(1).run(lora_cases.held, folder, {}, {}):
        assert trained < all_ / 4
        assert gradients < 1.1 * trained + 1024
        assert states == 2 * trained


BF16 = {"precision": "bfloat16"}
RESUMED = {
    "tp1-tp2-sp": ("qwen2", {}, TP2_SP, {}),
    "tp2-sp": ("qwen2", TP2_SP, TP2_SP, {}),
    "tp2-sp-pp2": ("qwen2", TP2_SP, PP2, {}),
    "pp2-dp2": ("qwen2", PP2, DISTRIBUTED, {}),
    "dp2-tp1": ("qwen2", DISTRIBUTED, {}, {}),
    "dp2-bf16": ("qwen2", DISTRIBUTED, DISTRIBUTED, BF16),
    "tp2-sp-bf16": ("qwen2", TP2_SP, TP2_SP, BF16),
    "ep2-tp1": ("qwen3-moe", EP2 | DISTRIBUTED, {}, {}),
    "tp1-tp2-sp-ep2": ("qwen3-moe", {}, TP2_SP | EP2, {}),
}


@pytest.mark.parametrize(("name", "before", "after", "policy"), RESUMED.values(), ids=RESUMED)
def test_a_checkpoint_has_adapters_alone_and_goes_on_in_any_layout(
    ranks, tmp_path, name, before, after, policy
):
    folder, output, data = hf_models.save(name, tmp_path / "model"), tmp_path / "checkpoint", batches()
    keys = lora_cases.EVERY_LINEAR if name == "qwen3-moe" else {}
    saved = folder, before, keys, data, str(output), policy
    expected = ranks(2 if before else 1).run(lora_cases.saved, *saved)
    assert not (output / "base").exists()
    assert not (output / "reference").exists()
    resumed = folder, after, keys, data[-1], str(output), policy
    for between, end in ranks(2 if after else 1).run(lora_cases.resumed, *resumed):
        for tensor, values in expected[0][0].items():
            assert (between[tensor] == values).all(), tensor
        for tensor, values in expected[0][1].items():
            limit = 0.0 if before == after else STEPS
            assert abs(end[tensor] - values).max() <= limit, tensor


def test_adapters_beside_another_model_are_not_loaded(ranks, tmp_path):
    folder, output = hf_models.save("qwen2", tmp_path / "model"), tmp_path / "checkpoint"
    ranks(1).run(lora_cases.saved, folder, {}, {}, batches()[:1], str(output))
    tensors = hf_models.tensors(folder)
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(RankFailedError, match=r"holds adapters beside .* its weights differ"):
        ranks(1).run(lora_cases.resumed, folder, {}, {}, batches()[0], str(output))


@pytest.mark.parametrize(
    ("name", "megatron", "keys"),
    [
        ("qwen2", {}, {}),
        ("qwen2", TP2_SP, {}),
        ("llama-tied", PP2, {"exclude_modules": ("linear_fc1", "*.layers.1.*")}),
        ("qwen3-moe", EP2, lora_cases.EVERY_LINEAR),
    ],
    ids=["qwen2", "qwen2-tp2-sp", "llama-tied-pp2", "qwen3-moe-ep2"],
)
def test_exports_give_the_same_in_transformers_and_peft(ranks, tmp_path, name, megatron, keys):
    import peft

    folder, data = hf_models.save(name, tmp_path / "model"), batches()[0]
    found = ranks(2 if megatron else 1).run(lora_cases.exported, folder, megatron, keys, data, str(tmp_path))
    said, adapters = found[0]
    merged = hf_models.logprobs(tmp_path / "merged", data["input_ids"], data["input_lengths"])
    assert abs(merged - said).max() < LOGPROBS
    with warnings.catch_warnings():
        # Of ranks that peft doubles itself, where it puts the adapters of gate and up together.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match")
        model = peft.PeftModel.from_pretrained(hf_models._float64(folder), str(tmp_path / "adapter"))
    with torch.no_grad():
        loaded, _ = hf_models._loss(model, data)
    assert abs(loaded.numpy() - said).max() < LOGPROBS
    # And into the same layers again, on another layout.
    pretrained = keys | {"pretrained_adapter": str(tmp_path / "adapter")}
    (again,) = ranks(1).run(lora_cases.start_of, folder, pretrained)
    assert again.keys() == adapters.keys()
    assert all((again[tensor] == values).all() for tensor, values in adapters.items())


def test_adapters_of_peft_with_an_a_of_each_projection_are_refused(ranks, folder, tmp_path):
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "k_proj", "v_proj"])
    peft.get_peft_model(hf_models._float64(folder), config).save_pretrained(tmp_path / "adapter")
    keys = {"pretrained_adapter": str(tmp_path / "adapter")}
    only = {"target_modules": ("linear_qkv",)}
    with pytest.raises(RankFailedError, match=r"has different As for model.layers.0.self_attn.q_proj.weight"):
        ranks(1).run(lora_cases.start_of, folder, keys | only)
    with pytest.raises(RankFailedError, match=r"lacks base_model.model.model.layers.0.mlp"):
        ranks(1).run(lora_cases.start_of, folder, keys)
    with pytest.raises(RankFailedError, match=r"has r: 4; 8 \(policy.megatron_cfg.peft.dim\)"):
        ranks(1).run(lora_cases.start_of, folder, keys | only | {"dim": 8})


def test_a_checkpoint_of_adapters_opens_by_itself(ranks, folder, tmp_path):
    from nemo_rl_mcore.models.pretrained import pretrained_model

    data = batches()
    ranks(1).run(lora_cases.saved, folder, {}, {}, data[:2], str(tmp_path / "step_1" / "policy"))
    (expected,) = ranks(1).run(
        lora_cases.logprobs_after, folder, {}, data[0], str(tmp_path / "step_1" / "policy")
    )
    model = pretrained_model(str(folder), {}).model_dump()
    (found,) = ranks(1).run(lora_cases.logprobs_of, str(tmp_path / "step_1"), model, {}, data[0])
    assert abs(found - expected).max() < LOGPROBS
