"""What a split step hands the optimizer is the gradient that plain autograd gives for all rows at once."""

import pytest
import tiny
import torch

LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2-overlap": (
        2,
        {"distributed_data_parallel_config": {"overlap_grad_reduce": True, "bucket_size": 3000}},
    ),
}
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
