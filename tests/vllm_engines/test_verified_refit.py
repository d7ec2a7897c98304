"""What goes wrong in vLLM's model after the weights have arrived, in either of two processes, is named."""

import contextlib
import functools
import itertools
import json
import sys
from unittest.mock import patch

import engine_process as tiny
import torch
from engine_contract import messages

from nemo_rl_mcore.config import ModelConfig
from nemo_rl_mcore.models import all_weights
from nemo_rl_mcore.models.config_json import hf_config_of
from nemo_rl_mcore.rank.refit import transports
from nemo_rl_mcore.rank.refit.digests import Digester, IncompleteRefitError, digests

TRANSPORTS = ["SharedMemorySender", "MessageSender"]
BOTH = (0, 1)
FAULTS = {
    "flip a bit of an entry": (["model.layers.1.self_attn.o_proj.weight"], (1,)),
    "flip a bit of one process's copy": (["model.layers.0.self_attn.k_proj.weight"], (1,)),
    "flip a bit of one process's norm": (["model.norm.weight"], (0,)),
    "flip a bit of the last word": (["model.embed_tokens.weight"], (0,)),
    "skip a tensor": (["model.layers.0.mlp.up_proj.weight"], BOTH),
    "leave a bucket at its old values": (
        ["model.layers.1.mlp.gate_proj.weight", "model.layers.1.input_layernorm.weight", "model.norm.weight"],
        BOTH,
    ),
    "swap two tensors": (
        ["model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"],
        BOTH,
    ),
    "write half of a tensor": (["model.layers.1.self_attn.v_proj.weight"], BOTH),
    "write the padding of the vocabulary": ([], BOTH),
}


def plant(worker, fault, names, old):
    """Change what this process's model holds: the values of its blocks of these tensors; old: of all, before."""
    from nemo_rl_mcore.engine.vllm.worker_extension import blocks

    model = worker.model_runner.get_model()
    held = {block.name: block.values for block in blocks(model)}
    values = [held[name] for name in names]
    match fault.split():
        case "flip", *_:
            values[0].view(torch.uint8).view(-1)[-1] ^= 16
        case "skip" | "leave", *_:
            for name, present in zip(names, values, strict=True):
                present.copy_(old[name])
        case "swap", *_:
            kept = values[0].clone()
            values[0].copy_(values[1])
            values[1].copy_(kept)
        case "write", "half", *_:
            rows = len(values[0]) // 2
            values[0][rows:] = old[names[0]][rows:]
        case "write", "the", "padding", *_:
            model.model.embed_tokens.weight.data[len(held["model.embed_tokens.weight"]) :] = 7


def send_by_value():
    """Let vLLM's processes, which do not import this file, get its functions whole."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])


def what_is_held(worker):
    from nemo_rl_mcore.engine.vllm.worker_extension import blocks

    return {block.name: block.values.clone() for block in blocks(worker.model_runner.get_model())}


def on_processes(worker, processes, function, arguments):
    if worker.rank in processes:
        function(worker, *arguments[worker.rank])


def complaints(folder):
    """What the engine says of each fault, over each transport, with the check and without."""
    from nemo_rl_mcore.engine.vllm.engine import VllmEngine

    send_by_value()
    tiny.model_folder(folder, "qwen3")
    # The engine casts what it is sent.
    engine = VllmEngine(tiny.settings(folder, tensor_parallel_size=2, precision="bfloat16"))
    models = [tiny.weights(tiny.transformers_model(folder, seed)) for seed in (0, 1)]
    found, version = {}, 0

    def refit(tensors, transport, verify, *after_receipt):
        nonlocal version
        version += 1
        digester = Digester("bfloat16")
        sender = getattr(transports, transport)(40_000)
        engine.begin_refit(version)
        for name, tensor in tensors:
            digester.add(name, tensor)
        for message in messages(tensors, sender):
            engine.load_bucket(message)
        for step in after_receipt:
            engine._llm.collective_rpc(step)
        sent = digester.digests()
        try:
            engine.finish_refit(version, sent if verify else dict.fromkeys(sent))
            return "accepted", engine.weights.version == version
        except IncompleteRefitError as error:
            return str(error), engine.weights.version is None

    for transport, fault, verify in itertools.product(TRANSPORTS, FAULTS, (True, False)):
        names, processes = FAULTS[fault]
        found["before", transport, fault, verify] = refit(models[0], transport, True)
        old = engine._llm.collective_rpc(what_is_held)
        step = functools.partial(
            on_processes,
            processes=processes,
            function=plant,
            arguments=[(fault, names, held) for held in old],
        )
        found["after", transport, fault, verify] = refit(models[1], transport, verify, step)
    engine.shutdown()
    return found


def test_a_fault_after_receipt_is_named_and_without_the_check_it_is_not(engine_process, tmp_path):
    [found] = engine_process.run(complaints, tmp_path / "model")
    for (when, transport, fault, verify), outcome in found.items():
        names, _ = FAULTS[fault]
        complaint = f"of 25 tensors {len(names)} not as they were sent: {', '.join(names)}"
        expected = complaint if names and verify and when == "after" else "accepted"
        assert outcome == (expected, True), (when, transport, fault, verify)
    assert len(found) == 2 * len(TRANSPORTS) * len(FAULTS) * 2


EXPERTS = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_query_groups": 1, "kv_channels": 32,
    "vocab_size": 32, "max_position_embeddings": 256, "qk_layernorm": True,
    "num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_router_topk": 2,
}  # fmt: skip
LAST_EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def tensors_of(model, seed):
    noise = torch.Generator().manual_seed(seed)
    for weight in all_weights(model):
        for name, shape in zip(weight.names, weight.slot.shapes(model), strict=True):
            yield name, torch.randn(shape, generator=noise)


def experts_refitted(folder, kernel):
    """What an engine says of a refit of experts, then of one that leaves one at its old values."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from nemo_rl_mcore.engine.vllm import worker_extension
    from nemo_rl_mcore.engine.vllm.engine import VllmEngine

    send_by_value()
    model = ModelConfig.model_validate(EXPERTS)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config_of(model)))

    def refit(engine, version, *after_receipt):
        engine.begin_refit(version)
        for message in messages(tensors_of(model, version), transports.SharedMemorySender(100_000)):
            engine.load_bucket(message)
        for step in after_receipt:
            step()
        try:
            return engine.finish_refit(version, digests(tensors_of(model, version)))
        except IncompleteRefitError as error:
            return str(error)

    with contextlib.ExitStack() as patches:
        if kernel == "as loaded":
            method = "process_weights_after_loading"
            patches.enter_context(patch.object(UnquantizedFusedMoEMethod, method, lambda self, layer: None))
            patches.enter_context(patch.object(worker_extension, "_AS_LOADED", (UnquantizedMoeBackend.CPU,)))
        engine = VllmEngine(tiny.settings(folder))
        found = [refit(engine, 0)]
        if kernel == "as loaded":
            [old] = engine._llm.collective_rpc(what_is_held)

            def skip():
                engine._llm.collective_rpc(plant, args=("skip a tensor", [LAST_EXPERT], old))

            found.append(refit(engine, 1, skip))
        engine.shutdown()
    return found


def test_an_expert_is_told_from_the_others(engine_process, tmp_path):
    [found] = engine_process.run(experts_refitted, tmp_path / "model", "as loaded")
    assert found == [0, f"of 45 tensors 1 not as they were sent: {LAST_EXPERT}"]


def test_weights_that_a_kernel_has_rearranged_are_named_and_not_taken_for_right(engine_process, tmp_path):
    [[found]] = engine_process.run(experts_refitted, tmp_path / "model", "rearranged")
    assert "24 sent and not found: model.layers.0.mlp.experts.0.gate_proj.weight, " in found
    assert "4 not to be read back (policy.generation.verify_refit: false does without): " in found
    for layer in range(2):
        for name in ("w13_weight", "w2_weight"):
            parameter = f"model.layers.{layer}.mlp.experts.routed_experts.{name}"
            assert f"{parameter} (the kernel CPU reads rearranged weights)" in found
