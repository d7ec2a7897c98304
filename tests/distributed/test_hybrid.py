"""A HybridModel is the GPTModel of the same weights: log-probabilities, gradients, steps and checkpoints."""

import pytest
import tiny

EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 0.1,
    "qk_layernorm": True,
}  # fmt: skip
BIASED = {
    "moe_aux_loss_coeff": 0.0, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 40}}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CP2, EP2 = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
SP, FUSED = {"sequence_parallel": True}, {"use_fused_linear_logprobs": True}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
UNEVEN = PP2 | {"num_layers_in_first_pipeline_stage": 1}
OVERLAP = {"distributed_data_parallel_config": {"overlap_grad_reduce": True, "bucket_size": 3000}}
GATHERED = {
    "distributed_data_parallel_config": {
        "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 3000,
    }
}  # fmt: skip
WHOLE_OPTIMIZER = {"optimizer": {"lr": 1e-2, "weight_decay": 0.0, "use_distributed_optimizer": False}}
RECOMPUTED = {"activation_checkpointing": True}
# Ranks, and keys of the model, of Megatron, of the policy.
CASES = {
    "one": (1, {}, FUSED, {}),
    "one-tied-unfused": (1, {"tie_word_embeddings": True}, {}, {}),
    "one-experts": (1, EXPERTS, {}, {}),
    "one-biased-experts": (1, EXPERTS | BIASED, {}, {}),
    "one-recomputed-experts": (1, EXPERTS, RECOMPUTED, {}),
    "one-packed": (1, {}, {}, PACKED),
    "one-yarn": (1, {"rope_scaling": YARN, "qk_layernorm": True, "add_qkv_bias": True}, {}, {}),
    "one-bf16": (1, {}, FUSED, {"precision": "bfloat16"}),
    "one-whole-optimizer": (1, {}, WHOLE_OPTIMIZER, {}),
    "dp2-overlap": (2, {}, OVERLAP, {}),
    "dp2-overlapped-gather": (2, {}, GATHERED, {}),
    "tp2": (2, {}, TP2, {}),
    "tp2-sp": (2, {}, TP2 | SP | FUSED, {}),
    "tp2-sp-experts": (2, EXPERTS, TP2 | SP, {}),
    "pp2": (2, {}, PP2 | FUSED, {}),
    "pp2-tied": (2, {"tie_word_embeddings": True}, PP2, {}),
    "pp2-uneven": (2, {"num_layers": 5}, UNEVEN, {}),
    "pp2-vpp2": (2, {"num_layers": 4}, VPP2, {}),
    "pp2-frozen": (2, {}, PP2 | {"freeze": ["*layers.0.mlp*"]}, {}),
    "cp2": (2, {}, CP2, {}),
    "cp2-packed": (2, {}, CP2, PACKED),
    "ep2": (2, EXPERTS, EP2, {}),
    "ep2-pp2": (4, EXPERTS, EP2 | PP2, {}),
}


def build(model_class, model, megatron, policy, **options):
    keys = megatron | {"model_class": model_class}
    return tiny.worker(tiny.policy_config(model=model, megatron=keys, **policy), **options)


def own_weights(worker, read):
    """What is read of each parameter of this rank, by the names that Hugging Face has for it."""
    from nemo_rl_mcore.rank.megatron.hf_weights.load import local_parameters

    own = local_parameters(worker.backend.chunks, worker.policy.model)
    return {weight.names: read(parameter).detach().float().numpy().copy() for weight, parameter in own}


def gradient(parameter):
    """What a step was given; nothing of a frozen weight."""
    return parameter.main_grad if parameter.requires_grad else parameter.new_zeros(0)


def logprobs(worker):
    return worker.get_logprobs(data=tiny.grpo_batch())["logprobs"].numpy()


def train(worker, seed):
    fused = worker.policy.megatron_cfg.use_fused_linear_logprobs
    result = worker.train(tiny.shard(tiny.grpo_batch(seed=seed)), tiny.grpo_loss(fused=fused))
    return result["all_mb_metrics"] | result.get("moe_metrics", {}) | {"norm": float(result["grad_norm"])}


def three_steps(model_class, model, megatron, policy):
    """The weights that a seed gives, log-probabilities before and after three steps, the first one's gradients."""
    worker = build(model_class, model, megatron, policy)
    found = {"start": own_weights(worker, lambda parameter: parameter), "before": logprobs(worker)}
    found["steps"] = [train(worker, 0)]
    found["gradients"] = own_weights(worker, gradient)
    found["steps"] += [train(worker, seed) for seed in (1, 2)]
    found |= {"end": own_weights(worker, lambda parameter: parameter), "after": logprobs(worker)}
    return found | {"modules": [type(chunk).__name__ for chunk in worker.backend.chunks[0].modules()]}


@pytest.mark.quick_cases("tp2-sp", "cp2", "ep2")
@pytest.mark.parametrize("case", CASES)
def test_a_hybrid_model_is_the_gpt_model_bit_for_bit(ranks, case):
    needed, *keys = CASES[case]
    for gpt, hybrid in zip(
        ranks(needed).run(three_steps, "gpt", *keys),
        ranks(needed).run(three_steps, "hybrid", *keys),
        strict=True,
    ):
        assert ("GPTModel" in gpt["modules"], "HybridLanguageModel" in hybrid["modules"]) == (True, True)
        assert gpt["steps"] == hybrid["steps"]
        for kind in ("start", "gradients", "end"):
            assert list(gpt[kind]) == list(hybrid[kind])
            assert [names for names, value in gpt[kind].items() if (value != hybrid[kind][names]).any()] == []
        for kind in ("before", "after"):
            assert (gpt[kind] == hybrid[kind]).all()
        assert abs(hybrid["after"] - hybrid["before"]).max() > 1e-2


# Checkpoints


def go_on(model_class, folder, model, megatron, loads):
    """Two steps of a policy that saves before them, or of one that loads what another class saved."""
    worker = build(model_class, model, megatron, {}, seed=7 if loads else 42)
    for seed in (3, 4):
        train(worker, seed)  # of other weights and moments, where others are loaded
    if loads:
        worker.load_checkpoint(folder)
    else:
        worker.save_checkpoint(folder)
    before = logprobs(worker)
    steps = [train(worker, seed) for seed in (5, 6)]
    whole = {name: tensor.numpy().copy() for name, tensor in worker.backend.full_tensors()}
    return before, steps, whole, logprobs(worker)


RESUMED = {
    "one": (1, {}, {}),
    "tp2-sp": (2, {}, TP2 | SP),
    "pp2-tied": (2, {"tie_word_embeddings": True}, PP2),
    "pp2-vpp2": (2, {"num_layers": 4}, VPP2),
    "cp2": (2, {}, CP2),
    "ep2": (2, EXPERTS | {"moe_aux_loss_coeff": 0.0}, EP2),
    "whole-optimizer": (2, {}, WHOLE_OPTIMIZER),
}


def assert_went_on_alike(found, wanted):
    """Both continued from the same weights and moments; layouts add in another order."""
    (before, steps, whole, after), (own_before, own_steps, own_whole, own_after) = wanted, found
    assert own_before == pytest.approx(before, abs=2e-5)
    for own, reference in zip(own_steps, steps, strict=True):
        assert own.keys() == reference.keys()
        for name in reference:
            assert own[name] == pytest.approx(reference[name], rel=2e-4, abs=2e-5), name
    assert list(own_whole) == list(whole)
    differences = {name: abs(value - own_whole[name]).max() for name, value in whole.items()}
    assert max(differences.values()) < 1e-4, max(differences, key=differences.get)
    assert own_after == pytest.approx(after, abs=2e-4)
    assert abs(after - before).max() > 1e-2


@pytest.mark.quick_cases("gpt-pp2-tied", "hybrid-tp2-sp")
@pytest.mark.parametrize("layout", RESUMED)
@pytest.mark.parametrize("saver", ["gpt", "hybrid"])
def test_a_checkpoint_of_one_class_goes_on_in_the_other_in_another_layout(ranks, tmp_path, saver, layout):
    needed, model, megatron = RESUMED[layout]
    loader = {"gpt": "hybrid", "hybrid": "gpt"}[saver]
    (wanted,) = ranks(1).run(go_on, saver, str(tmp_path / "step"), model, {}, False)
    for found in ranks(needed).run(go_on, loader, str(tmp_path / "step"), model, megatron, True):
        assert_went_on_alike(found, wanted)
