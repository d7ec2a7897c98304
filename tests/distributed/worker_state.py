"""Everything that a train step may change on a rank, as one flat dictionary: to compare bit for bit, to set back."""

from __future__ import annotations

import tiny
import torch


def capture(of):
    """Copies of all tensors, and the values of schedule, generators, hooks and modes."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    found = {name: tensor.detach().clone() for name, tensor in _tensors(of).items()}
    found["generator"] = torch.get_rng_state()
    found["tracker"] = {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
    return found | _settings(of)


def differences(left, right):
    """The names under which two states do not agree in every bit."""
    shared = left.keys() & right.keys()
    changed = {name for name in shared if not _same(left[name], right[name])}
    return sorted(changed | (left.keys() ^ right.keys()))


def restore(to, state):
    """Set a state without gradients back. The optimizer must have the moments it had then, whatever their values."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    to.backend.zero_grad()
    with torch.no_grad():
        for name, tensor in _tensors(to).items():
            tensor.copy_(state[name])
    torch.set_rng_state(state["generator"])
    get_cuda_rng_tracker().set_states({k: v.clone() for k, v in state["tracker"].items()})
    to.backend.scheduler.num_steps = state["scheduler"]["num_steps"]
    to.backend.scheduler.step(0)


def with_dropout(worker, probability=0.2):
    """The worker, whose passes now draw from the generator: a step differs unless that is restored."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for chunk in worker.backend.chunks:
        for module in chunk.modules():
            if isinstance(module, TransformerLayer):
                module.hidden_dropout = probability
    return worker


def prepared(sections, **options):
    """A worker that has trained one step, so that its optimizer has moments, and cleared its gradients."""
    worker = with_dropout(tiny.worker(tiny.policy_config(**sections), **options))
    hooks = dict(vars(worker.backend.config))
    worker.train(tiny.shard(tiny.grpo_batch(rows=16, seed=9)), tiny.grpo_loss(), gbs=16)
    assert vars(worker.backend.config) == hooks, "a step sets Megatron's hooks back"
    worker.backend.zero_grad()
    return worker


def inner_optimizers(of):
    """The torch optimizers that hold main parameters and moments."""
    return [part.optimizer for part in of.backend.optimizer.chained_optimizers]


def _tensors(of):
    found = {}
    for stage, chunk in enumerate(of.backend.chunks):
        for name, parameter in chunk.named_parameters():
            found[f"parameter {stage}.{name}"] = parameter
            if parameter.requires_grad:
                found[f"gradient {stage}.{name}"] = parameter.main_grad
        found |= {f"buffer {stage}.{name}": buffer for name, buffer in chunk.named_buffers()}
    for number, optimizer in enumerate(inner_optimizers(of)):
        main = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for place, parameter in enumerate(main):
            found[f"main parameter {number}.{place}"] = parameter
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{key} {number}.{place}"] = value
    return found


def _settings(of):
    backend = of.backend
    bucket_groups = [group for chunk in backend.chunks for group in chunk.bucket_groups]
    parameters = [parameter for chunk in backend.chunks for parameter in chunk.parameters()]
    return {
        "scheduler": backend.scheduler.state_dict(),
        "parameter groups": [
            {key: value for key, value in group.items() if key != "params"}
            for optimizer in inner_optimizers(of)
            for group in optimizer.param_groups
        ],
        # Megatron's hooks are fields of its config.
        "config": dict(vars(backend.config)),
        "bucket groups reduce": [group.is_last_microbatch for group in bucket_groups],
        "reductions in flight": [group.grad_reduce_handle is not None for group in bucket_groups],
        "torch's own gradients": [parameter.grad is not None for parameter in parameters],
        "training mode": [module.training for chunk in backend.chunks for module in chunk.modules()],
        "gradient mode": torch.is_grad_enabled(),
    }


def _same(left, right):
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return bool(left == right)
