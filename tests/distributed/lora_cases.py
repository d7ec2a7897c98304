"""What the ranks run for test_lora: kept apart from it, since they need not import transformers and peft."""

from contextlib import suppress
from pathlib import Path

import hf_weight_cases as cases
import tiny
import torch
from hf_weight_cases import data_of

from nemo_rl_mcore.losses import NLLLossFn

PEFT = {"enabled": True, "dim": 4, "alpha": 6.0, "lora_B_init_method": "normal"}
EVERY_LINEAR = {"target_modules": ("*.linear_*",)}
ADAM = {"lr": 5e-3, "weight_decay": 0.1, "adam_eps": 1e-3}


def worker_of(folder, megatron, peft, **policy):
    keys = {"optimizer": ADAM | {"use_distributed_optimizer": False}, "peft": PEFT | peft} | megatron
    return tiny.worker(cases.policy_of(folder, keys, **{"max_grad_norm": 0.0} | policy))


def adapters_of(worker):
    from nemo_rl_mcore.rank.megatron.hf_weights.export import adapter_tensors

    return {
        name: tensor.float().numpy().copy()
        for name, tensor in adapter_tensors(worker.backend.chunks, worker.policy)
    }


def start_of(folder, peft):
    return adapters_of(worker_of(folder, {}, peft))


def trained(folder, megatron, peft, batches, policy):
    """Adapters at the start and the end; of the first batch log-probabilities, and gradients with their norm."""
    worker = worker_of(folder, megatron, peft, **(policy or {}))
    start, base = adapters_of(worker), base_of(worker)
    said = worker.get_logprobs(data=data_of(batches[0]))["logprobs"].numpy()
    gradients, copies, norms = {}, copies_differ(worker), []
    for batch in batches:
        norms.append(float(worker.train(tiny.shard(data_of(batch)), NLLLossFn())["grad_norm"]))
        if not gradients and not worker.policy.megatron_cfg.optimizer.use_distributed_optimizer:
            gradients = gradients_of(worker)
    assert all(torch.equal(tensor, base[name]) for name, tensor in base_of(worker).items())
    assert not copies
    assert not copies_differ(worker)
    return start, said, norms[0], gradients, adapters_of(worker)


def base_of(worker):
    return {
        f"{number}.{name}": parameter.detach().clone()
        for number, chunk in enumerate(worker.backend.chunks)
        for name, parameter in chunk.named_parameters()
        if ".lora." not in name
    }


def gradients_of(worker):
    """The gradients of adapters as peft's tensors."""
    trainable = [parameter for chunk in worker.backend.chunks for parameter in chunk.parameters()]
    kept = [(one, one.detach().clone()) for one in trainable if one.requires_grad]
    for parameter, _ in kept:
        parameter.data.copy_(parameter.main_grad)
    found = adapters_of(worker)
    for parameter, value in kept:
        parameter.data.copy_(value)
    return found


def copies_differ(worker):
    """The names of parameters that tensor-parallel ranks hold whole, and differently."""
    import torch.distributed as dist

    from nemo_rl_mcore.rank.megatron import parallel_groups

    group = parallel_groups.group("tensor")
    different = []
    for chunk in worker.backend.chunks:
        for name, parameter in chunk.named_parameters():
            if ".lora." not in name or getattr(parameter, "tensor_model_parallel", False):
                continue
            of_ranks = [torch.empty_like(parameter) for _ in range(group.size())]
            dist.all_gather(of_ranks, parameter.detach().contiguous(), group=group)
            if not all(torch.equal(one, parameter) for one in of_ranks):
                different.append(name)
    return different


def split_and_aborted(folder, megatron, position, batch):
    """Whether a split step is `train` bit for bit, and an aborted one leaves no trace."""
    peft = {"dropout": 0.3, "dropout_position": position}
    keys = {"train_micro_batch_size": 1}
    worker = worker_of(folder, megatron, peft, **keys)
    data = tiny.shard(data_of(batch))
    worker.train(data, NLLLossFn())
    assert not copies_differ(worker)
    whole = tiny.parameters(worker)
    del worker
    worker = worker_of(folder, megatron, peft, **keys)
    start = tiny.parameters(worker)
    worker.begin_train_step(NLLLossFn())
    worker.train_microbatch(data.slice(0, 1))
    worker.abort_train_step()
    aborted = tiny.parameters(worker)
    worker.begin_train_step(NLLLossFn())
    for row in range(data.size):
        worker.train_microbatch(data.slice(row, row + 1))
        worker.get_reference_policy_logprobs(data=data_of(batch))
    worker.finish_train_step()
    split = tiny.parameters(worker)
    moved = any(not torch.equal(split[name], start[name]) for name in start)
    return (
        moved,
        [name for name in start if not torch.equal(start[name], aborted[name])],
        [name for name in start if not torch.equal(whole[name], split[name])],
    )


def reference(folder, megatron, batch):
    """Log-probabilities of the base, of a trained model's reference, and after an error within it; and the policy's."""
    from nemo_rl_mcore.rank.megatron.lora import adapters_off

    data = data_of(batch)
    # All of it frozen: as Megatron computes with weights that are not trained.
    plain = worker_of(
        folder, megatron | {"freeze": ("model.layers.*", "lm_head*", "model.embed*")}, {"enabled": False}
    )
    base = plain.get_logprobs(data=data)["logprobs"]
    del plain
    worker = worker_of(folder, megatron, {})
    worker.train(tiny.shard(data), NLLLossFn())
    policy = worker.get_logprobs(data=data)["logprobs"]
    found = worker.get_reference_policy_logprobs(data=data)["reference_logprobs"]
    with suppress(RuntimeError), adapters_off(worker.backend.chunks):
        raise RuntimeError("on purpose")
    again = worker.get_logprobs(data=data)["logprobs"]
    return torch.equal(base, found), torch.equal(policy, again), bool((policy - base).abs().max() > 1e-3)


def held(folder, megatron, peft):
    """Numbers that this rank trains and holds besides, those of gradient buckets, and those the optimizer keeps."""
    from nemo_rl_mcore.rank.megatron.optimizer_state import _ensure_moments, parts_of, states_of_weights

    worker = worker_of(folder, megatron, peft)
    parameters = [parameter for chunk in worker.backend.chunks for parameter in chunk.parameters()]
    for part in parts_of(worker.backend.optimizer):
        _ensure_moments(part)
    states = states_of_weights(worker.backend.optimizer)
    buffers = [
        buffer
        for chunk in worker.backend.chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    return (
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        sum(parameter.numel() for parameter in parameters),
        sum(buffer.grad_data.numel() for buffer in buffers),
        sum(value.numel() for _, kept in states for value in kept.values()),
    )


def saved(folder, megatron, peft, batches, output, policy=None):
    """Train on all but the last batch, save, then a step on the last: the adapters after either."""
    worker = worker_of(folder, megatron, peft, **(policy or {}))
    *first, last = batches
    for batch in first:
        worker.train(tiny.shard(data_of(batch)), NLLLossFn())
    worker.save_checkpoint(output)
    between = adapters_of(worker)
    worker.train(tiny.shard(data_of(last)), NLLLossFn())
    return between, adapters_of(worker)


def resumed(folder, megatron, peft, batch, output, policy=None):

    worker = worker_of(folder, megatron, peft, **(policy or {}))
    worker.load_checkpoint(output)
    between = adapters_of(worker)
    worker.train(tiny.shard(data_of(batch)), NLLLossFn())
    return between, adapters_of(worker)


def exported(folder, megatron, peft, batch, output):
    """A folder of peft and one of merged weights after a step; log-probabilities of the batch, and digests."""
    from nemo_rl_mcore.rank.megatron.hf_weights.adapters import save_adapters

    worker = worker_of(folder, megatron, peft)
    worker.train(tiny.shard(data_of(batch)), NLLLossFn())
    save_adapters(worker.backend.chunks, worker.policy, Path(output) / "adapter", origin=str(folder))
    worker.export_hf(str(Path(output) / "merged"))
    return worker.get_logprobs(data=data_of(batch))["logprobs"].numpy(), adapters_of(worker)


def logprobs_after(folder, megatron, batch, output):
    worker = worker_of(folder, megatron, {})
    worker.load_checkpoint(output)
    return worker.get_logprobs(data=data_of(batch))["logprobs"].numpy()


def logprobs_of(checkpoint, model, peft, batch):
    """Of a frozen model that is opened by a checkpoint alone."""
    sections = {
        "init_checkpoint": checkpoint, "model": model, "tokenizer": {"name": "char"},
        "train_global_batch_size": 4, "train_micro_batch_size": 2, "max_total_sequence_length": cases.LENGTH,
        "generation": {"max_new_tokens": 4, "temperature": 1.0},
        "megatron_cfg": {"optimizer": ADAM, "peft": PEFT | peft},
    }  # fmt: skip
    config = tiny.PolicyConfig.model_validate(sections)
    worker = tiny.worker(config, trained=False)
    return worker.get_logprobs(data=data_of(batch))["logprobs"].numpy()
