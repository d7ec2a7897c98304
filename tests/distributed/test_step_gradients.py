"""What the optimizer is given and leaves: plain autograd's gradients, replicas in agreement, weights that decay."""

import pytest
import tiny
import torch

OVERLAP = {"distributed_data_parallel_config": {"overlap_grad_reduce": True, "bucket_size": 3000}}
LAYOUTS = {"one": (1, {}), "dp2": (2, {}), "dp2-overlap": (2, OVERLAP)}
# What a step leaves in the gradient buckets is whole on every rank with the plain optimizer only.
PLAIN = {"optimizer": {"lr": 1e-2, "weight_decay": 0.0, "use_distributed_optimizer": False}}
TEMPERATURE = 0.7


def plain_gradients(worker, batch, loss_fn):
    """By name: Megatron's logits, then a log-softmax in float64, the familiar loss call and torch.autograd.grad."""
    model = worker.backend.chunks[0]
    rows, length = batch["input_ids"].shape
    logits = model(
        batch["input_ids"],
        torch.arange(length).expand(rows, -1),
        torch.ones(1, 1, length, length).triu(1).bool(),
    )
    every = (logits[:, :-1].double() / TEMPERATURE).log_softmax(-1)
    logprobs = every.gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    entropy = -(every.exp() * every).sum(-1)
    tokens = (batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]).sum()
    loss, _ = loss_fn(logprobs, batch, batch["sample_mask"].sum(), tokens, entropy=entropy)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def gradient_errors(megatron, token_level, cuts):
    """The largest relative error over parameters, and of the norm, of the second step; `cuts` divide a rank's rows."""
    config = tiny.policy_config(
        megatron=megatron | PLAIN,
        max_grad_norm=0.0,
        generation={"max_new_tokens": 4, "temperature": TEMPERATURE},
    )
    worker = tiny.worker(config, init_reference_model=False)
    loss_fn = tiny.grpo_loss(token_level_loss=token_level)
    worker.train(tiny.shard(tiny.grpo_batch(seed=1)), loss_fn)
    batch = tiny.grpo_batch()
    wanted = plain_gradients(worker, batch, loss_fn)
    mine = tiny.shard(batch)
    worker.begin_train_step(loss_fn)
    for first, last in zip([0, *cuts], [*cuts, mine.size], strict=True):
        worker.train_microbatch(mine.slice(first, last))
    found_norm = float(worker.finish_train_step()["grad_norm"])
    found = {name: parameter.main_grad for name, parameter in worker.backend.chunks[0].named_parameters()}
    scale = max(float(gradient.abs().max()) for gradient in wanted.values())
    norm = float(torch.cat([gradient.flatten() for gradient in wanted.values()]).norm())
    worst = max(float((found[name] - wanted[name]).abs().max()) for name in wanted) / scale
    return worst, abs(found_norm / norm - 1)


@pytest.mark.each_value
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("token_level", [True, False], ids=["token-level", "sequence-level"])
@pytest.mark.parametrize("cuts", [(), (3,), (1, 1, 2)], ids=str)
def test_a_split_step_has_the_gradient_of_plain_autograd(ranks, layout, token_level, cuts):
    world_size, megatron = LAYOUTS[layout]
    for errors in ranks(world_size).run(gradient_errors, megatron, token_level, cuts):
        assert max(errors) < 1e-5


# Replicas


def trained_weights(megatron):
    worker = tiny.worker(tiny.policy_config(model={"tie_word_embeddings": True}, megatron=megatron))
    for step in range(3):
        worker.train(tiny.shard(tiny.grpo_batch(seed=step)), tiny.grpo_loss())
    return {name: parameter.numpy() for name, parameter in tiny.parameters(worker).items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_replicated_parameters_stay_equal_on_tensor_parallel_ranks(ranks, sequence_parallel):
    first, second = ranks(2).run(
        trained_weights, {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    )
    norms = [name for name in first if "norm" in name]
    assert len(norms) == 5
    for name in norms:
        assert (first[name] == second[name]).all(), name
        assert abs(first[name] - 1).max() > 1e-3, f"{name} was not trained"


def test_tied_embeddings_stay_equal_on_first_and_last_stage(ranks):
    first, last = ranks(2).run(trained_weights, {"pipeline_model_parallel_size": 2})
    embedding = first["0.module.embedding.word_embeddings.weight"]
    assert (embedding == last["0.module.output_layer.weight"]).all()


# Weights that decay


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
