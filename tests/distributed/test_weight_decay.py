"""Which weights decay: matrices alone, or norms and biases as well; in each layout, and after a resume."""

import pytest
import tiny
import torch

LR, DECAY = 1e-2, 0.5
BIASED = {"add_qkv_bias": True}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}


def build(decay, *, everything, model, megatron, distributed=True):
    optimizer = {"lr": LR, "weight_decay": decay, "decay_norms_and_biases": everything}
    optimizer["use_distributed_optimizer"] = distributed
    config = tiny.policy_config(model=model, megatron={"optimizer": optimizer, **megatron})
    worker = tiny.worker(config)
    with torch.no_grad():
        for chunk in worker.backend.chunks:
            for weight in chunk.parameters():
                weight += 0.1 * (weight.ndim == 1)  # biases begin at 0, of which nothing decays
    worker.backend.optimizer.reload_model_params()
    return worker


def step(worker, seed):
    """The weights before and after a step."""
    before = tiny.parameters(worker)
    worker.train(tiny.shard(tiny.grpo_batch(seed=seed)), tiny.grpo_loss())
    return before, tiny.parameters(worker)


def decayed(everything, options):
    """The weights that a step with a decay leaves smaller by it, those that it does not, and the rest, by name."""
    _, plain = step(build(0.0, everything=everything, **options), 0)
    before, after = step(build(DECAY, everything=everything, **options), 0)
    found = {True: set(), False: set(), None: set()}
    for name, weight in before.items():
        moved = plain[name] - after[name]
        decays = torch.allclose(moved, LR * DECAY * weight, rtol=0, atol=1e-6)
        stays = torch.equal(plain[name], after[name])
        found[None if decays == stays else decays].add((name, weight.ndim))
    return found[True], found[False], found[None]


@pytest.mark.each_value
@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {"model": BIASED, "megatron": {}}),
        (1, {"model": BIASED, "megatron": {}, "distributed": False}),
        (2, {"model": BIASED, "megatron": {"tensor_model_parallel_size": 2}}),
        (2, {"model": BIASED, "megatron": {"pipeline_model_parallel_size": 2}}),
        (2, {"model": EXPERTS, "megatron": {"expert_model_parallel_size": 2}}),
    ],
)
def test_norms_and_biases_decay_where_a_recipe_says_so(ranks, world_size, options, everything):
    for decays, stays, neither in ranks(world_size).run(decayed, everything, options):
        assert not neither
        assert {ndim for _, ndim in decays} == ({1, 2} if everything else {2})
        assert {ndim for _, ndim in stays} == (set() if everything else {1})


def saved_and_resumed(folder):
    """Weights before a second step, and after it: undisturbed, resumed, and resumed with everything decaying."""
    first = build(DECAY, everything=False, model=BIASED, megatron={})
    step(first, 0)
    folder.mkdir()
    first.save_checkpoint(str(folder))
    before, undisturbed = step(first, 1)
    found = [before, undisturbed]
    for everything in (False, True):
        worker = build(DECAY, everything=everything, model=BIASED, megatron={})
        worker.load_checkpoint(str(folder))
        found.append(step(worker, 1)[1])
    return [{name: weight.numpy() for name, weight in weights.items()} for weights in found]


def test_a_resumed_run_may_let_them_decay_from_then_on(ranks, tmp_path):
    ((before, undisturbed, resumed, everything),) = ranks(1).run(saved_and_resumed, tmp_path / "policy")
    for name, weight in before.items():
        assert (resumed[name] == undisturbed[name]).all()
        lost = LR * DECAY * weight * (weight.ndim == 1)
        assert resumed[name] - everything[name] == pytest.approx(lost, abs=1e-6)
