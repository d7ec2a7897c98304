"""Multi-token prediction: its loss and gradients by hand, on every layout, fused and unfused, and only in training."""

import pytest
import tiny
import torch
from test_moe import rows_of_microbatches
from tolerances import LOGPROBS, METRICS

MODEL = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}
# What a step leaves in the gradient buckets is whole on every rank with the plain optimizer only.
PLAIN = {"optimizer": {"lr": 1e-2, "weight_decay": 0.0, "use_distributed_optimizer": False}}
TWO_RANKS = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "recompute": {"activation_checkpointing": True},
}


def one_step(megatron, model, weights, token_level, mbs, chunk_rows, factor=MODEL["mtp_loss_scaling_factor"]):
    """A step of chunks: the weights, gradients by global name, what the prediction layers were given, the result."""
    config = tiny.policy_config(
        model=MODEL | model | {"mtp_loss_scaling_factor": factor},
        megatron=PLAIN | megatron,
        max_grad_norm=0.0,
    )
    worker = tiny.worker(config)
    if weights is not None:
        tiny.load_full_weights(worker, weights)
    start = tiny.parameters(worker)
    seen = []
    for name, part in worker.backend.chunks[0].named_modules():
        if name.endswith("module.mtp") or name == "module.mtp":
            part.register_forward_pre_hook(
                lambda _module, _args, kwargs: seen.append(kwargs["hidden_states"].detach().clone()),
                with_kwargs=True,
            )
    batch = tiny.shard(tiny.grpo_batch())
    loss_fn = tiny.grpo_loss(
        fused=config.megatron_cfg.use_fused_linear_logprobs, token_level_loss=token_level
    )
    worker.begin_train_step(loss_fn, mbs=mbs)
    first = 0
    for rows in chunk_rows:
        worker.train_microbatch(batch.slice(first, first + rows))
        worker.get_logprobs(data=batch)
        first += rows
    result = worker.finish_train_step()
    gradients = {
        f"0.{tiny.global_name(name, config)}": parameter.main_grad.clone()
        for name, parameter in worker.backend.chunks[0].named_parameters()
    }
    return start, gradients, seen, result


def gradients_and_oracle(token_level, mbs, chunk_rows):
    step = token_level, mbs, chunk_rows
    _, without, _, _ = one_step({}, {}, None, *step, factor=0.0)
    start, found, seen, result = one_step({}, {}, None, *step)
    wanted, losses = by_hand(start, seen, tiny.grpo_batch(), *step)
    added = {name: (found[name] - without[name]).double() for name in wanted}
    difference = {
        name: float((added[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in wanted
    }
    return difference, losses, result["mtp_metrics"]


def by_hand(weights, hiddens, batch, token_level, mbs, chunk_rows):
    """The gradients of factor / layers * the mean cross-entropies, and these."""
    named = {
        name: value.double().requires_grad_()
        for name, value in weights.items()
        if "mtp" in name or "embedding" in name or "output_layer" in name
    }
    valid = (batch["token_mask"] * batch["sample_mask"][:, None]).double()
    parts = valid[:, 1:].sum(1) if token_level else batch["sample_mask"].double()
    total, losses = 0.0, []
    rows_of = list(rows_of_microbatches(mbs, chunk_rows))
    for hidden_SBH, rows in zip(hiddens, rows_of, strict=True):
        # What the layers were given ends on the prediction path here; filler rows have no label.
        own = cross_entropies(
            named, hidden_SBH[:, : len(rows)].double(), batch["input_ids"][rows], valid[rows]
        )
        losses.append([float(loss) for loss in own if loss is not None])
        share = parts[rows].sum() / parts.sum()
        total = total + MODEL["mtp_loss_scaling_factor"] / 2 * share * sum(x for x in own if x is not None)
    total.backward()
    trained = [loss for loss in losses if loss]
    means = [sum(loss[depth] for loss in trained) / len(trained) for depth in range(2)]
    # The embedding and the output layer have a gradient of their own from the decoder's side.
    return {name: value.grad for name, value in named.items() if "embedding" not in name}, means


def cross_entropies(weights, hidden_SBH, ids_BS, valid_BS):
    """The mean loss of each depth: at depth k position i predicts token i + 1 + k; None where no such token counts."""
    length, losses = ids_BS.shape[1], []
    for depth in (1, 2):
        prefix = f"0.module.mtp.layers.{depth - 1}."
        later = torch.nn.functional.pad(ids_BS[:, depth:], (0, depth))
        embedded = weights["0.module.embedding.word_embeddings.weight"][later].transpose(0, 1)
        both = torch.cat(
            [
                norm(embedded, weights[prefix + "enorm.weight"]),
                norm(hidden_SBH, weights[prefix + "hnorm.weight"]),
            ],
            -1,
        )
        hidden_SBH = layer(weights, prefix + "mtp_model_layer.", both @ weights[prefix + "eh_proj.weight"].T)
        hidden_SBH = norm(hidden_SBH, weights[prefix + "final_layernorm.weight"])
        logprobs = (hidden_SBH @ weights["0.module.output_layer.weight"].T).log_softmax(-1).transpose(0, 1)
        positions = length - 1 - depth
        picked = logprobs[:, :positions].gather(2, ids_BS[:, 1 + depth :, None]).squeeze(2)
        mask = valid_BS[:, 1 + depth :]
        losses.append(-(picked * mask).sum() / mask.sum() if mask.sum() else None)
    return losses


def norm(x, weight, eps=1e-5):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def layer(weights, prefix, x):
    """A pre-norm layer: four query heads of size 8 in two groups, rotary positions, a gated feed-forward part."""
    length, rows, _ = x.shape
    inner = norm(x, weights[prefix + "input_layernorm.weight"])
    grouped = (inner @ weights[prefix + "self_attention.linear_qkv.weight"].T).view(length, rows, 2, 4, 8)
    queries, keys, values = grouped[:, :, :, :2], grouped[:, :, :, 2:3], grouped[:, :, :, 3:]
    scores = torch.einsum("sbghd,tbgkd->bghst", rotated(queries), rotated(keys)) / 8**0.5
    future = torch.ones(length, length).triu(1).bool()
    shares = scores.masked_fill(future, -torch.inf).softmax(-1)
    mixed = torch.einsum("bghst,tbgkd->sbghd", shares, values).reshape(length, rows, 32)
    x = x + mixed @ weights[prefix + "self_attention.linear_proj.weight"].T
    inner = norm(x, weights[prefix + "pre_mlp_layernorm.weight"])
    gate, up = (inner @ weights[prefix + "mlp.linear_fc1.weight"].T).chunk(2, -1)
    return x + (torch.nn.functional.silu(gate) * up) @ weights[prefix + "mlp.linear_fc2.weight"].T


def rotated(heads):
    length, size = heads.shape[0], heads.shape[-1]
    speeds = 10000.0 ** (-torch.arange(0, size, 2).double() / size)
    angles = (torch.arange(length).double()[:, None] * speeds).repeat(1, 2)[:, None, None, None]
    first, second = heads.chunk(2, -1)
    return heads * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


@pytest.mark.parametrize("token_level", [True, False], ids=["token-level", "sequence-level"])
@pytest.mark.parametrize(("mbs", "chunk_rows"), [(8, (8,)), (2, (3, 5))], ids=str)
def test_gradients_are_the_factor_times_the_mean_loss(ranks, token_level, mbs, chunk_rows):
    difference, losses, metrics = ranks(1).run(gradients_and_oracle, token_level, mbs, chunk_rows)[0]
    assert len(difference) == 2 * 10 + 1
    assert max(difference.values()) < 1e-4, difference
    assert list(metrics) == ["mtp_1 loss", "mtp_2 loss"]
    assert list(metrics.values()) == pytest.approx(losses, rel=1e-5)


def step_of(megatron, model, weights, rows):
    start, gradients, _, result = one_step(megatron, model, weights, True, 2, (rows,))
    start = {name: value.numpy() for name, value in start.items()}
    gradients = {name: value.numpy() for name, value in gradients.items()}
    metrics = result["all_mb_metrics"] | {"norm": result["grad_norm"].tolist()}
    return start, gradients, metrics, result["mtp_metrics"]


@pytest.fixture(scope="module")
def single_rank(ranks):
    return ranks(1).run(step_of, {}, {}, None, 8)[0]


@pytest.mark.each_value
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("layout", TWO_RANKS)
def test_every_layout_and_both_paths_train_alike(ranks, single_rank, layout, fused):
    weights, gradients, metrics, losses = single_rank
    one = layout == "recompute"
    megatron = TWO_RANKS[layout] | {"use_fused_linear_logprobs": fused, "fused_linear_logprobs_chunk_size": 5}
    rows = 4 if layout == "dp2" else 8
    for _, own_gradients, own_metrics, own_losses in ranks(1 if one else 2).run(
        step_of, megatron, {}, weights, rows
    ):
        for name in metrics:
            assert own_metrics[name] == pytest.approx(metrics[name], **METRICS), name
        assert own_losses == pytest.approx(losses, rel=1e-5)
        for name, own in own_gradients.items():
            if own.shape == gradients[name].shape:
                assert own == pytest.approx(gradients[name], abs=1e-5), name


def tied_gradients(fused, megatron):
    return step_of(megatron | {"use_fused_linear_logprobs": fused}, {"tie_word_embeddings": True}, None, 8)


@pytest.mark.parametrize("megatron", [{}, {"pipeline_model_parallel_size": 2}], ids=["pp1", "pp2"])
def test_tied_embeddings_fused_and_unfused_agree(ranks, megatron):
    pool = ranks(megatron.get("pipeline_model_parallel_size", 1))
    unfused, fused = pool.run(tied_gradients, False, megatron), pool.run(tied_gradients, True, megatron)
    for (_, gradients, _, losses), (_, own, _, own_losses) in zip(unfused, fused, strict=True):
        assert own_losses == pytest.approx(losses, rel=1e-5)
        for name in gradients:
            assert own[name] == pytest.approx(gradients[name], abs=1e-5), name
    embeddings = [rank[1]["0.module.embedding.word_embeddings.weight"] for rank in unfused]
    assert all((other == embeddings[0]).all() for other in embeddings)


def passes_without_gradients():
    worker = tiny.worker(tiny.policy_config(model=MODEL))
    model = worker.backend.chunks[0].module
    calls = []
    model.mtp.register_forward_hook(lambda *_: calls.append(1))
    plain = tiny.worker(tiny.policy_config())
    shared = {name: value.numpy() for name, value in tiny.parameters(worker).items() if "mtp" not in name}
    tiny.load_full_weights(plain, shared)
    batch = tiny.grpo_batch()
    wanted = plain.get_logprobs(data=batch)["logprobs"]
    found = worker.get_logprobs(data=batch)["logprobs"]
    evaluated = worker.train(batch, tiny.grpo_loss(), eval_mode=True)
    skipped = len(calls)
    worker.train(batch, tiny.grpo_loss())
    return (
        found.numpy(),
        wanted.numpy(),
        skipped,
        len(calls),
        evaluated["mtp_metrics"],
        model.config.mtp_num_layers,
    )


def test_only_training_runs_the_prediction_layers(ranks):
    found, wanted, skipped, trained, metrics, layers = ranks(1).run(passes_without_gradients)[0]
    assert found == pytest.approx(wanted, abs=LOGPROBS)
    assert (skipped, trained, metrics, layers) == (0, 4, {}, 2)
