"""What the ranks run for test_hf_weights: kept apart from it, since they need not import transformers."""

import json
from pathlib import Path

import tiny
import torch

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import NLLLossFn
from nemo_rl_mcore.models.pretrained import fill_from_model_name

LENGTH = 40


def policy_of(folder, megatron, **policy):
    sections = {
        "model_name": str(folder),
        "tokenizer": {"name": "char"},
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "max_total_sequence_length": LENGTH,
        "generation": {"max_new_tokens": 4, "temperature": 1.0},
        "megatron_cfg": {"optimizer": {"lr": 1e-2, "weight_decay": 0.0}} | megatron,
    }
    return PolicyConfig.model_validate(fill_from_model_name(sections | policy)[0])


def data_of(batch):
    return BatchedDataDict(**{name: torch.from_numpy(values) for name, values in batch.items()})


def loaded_logprobs(folder, megatron, ids, lengths, **policy):
    worker = tiny.worker(policy_of(folder, megatron, **policy))
    data = tiny.BatchedDataDict(input_ids=torch.from_numpy(ids), input_lengths=torch.from_numpy(lengths))
    found = worker.get_logprobs(data=data)["logprobs"].numpy()
    exported = {name: tensor.clone() for name, tensor in full_tensors_of(worker)}
    return found, {name: as_bits(tensor) for name, tensor in exported.items()}


def full_tensors_of(worker):
    from nemo_rl_mcore.rank.megatron.hf_weights.export import full_tensors

    return full_tensors(worker.backend.chunks, worker.policy)


def as_bits(tensor):
    """A numpy array that tells bit patterns apart; numpy knows no bfloat16."""
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32).numpy()


def saved_again(folder, megatron, output, shard_bytes, **policy):
    from nemo_rl_mcore.rank.megatron.hf_weights.export import save_pretrained

    worker = tiny.worker(policy_of(folder, megatron, **policy))
    save_pretrained(worker.backend.chunks, worker.policy, Path(output), shard_bytes=shard_bytes)


def weights_in_bf16(folder, megatron):
    """The exported bits, and the sums of the optimizer's fp32 copies and of the weights."""
    worker = tiny.worker(policy_of(folder, megatron, precision="bfloat16"))
    copies = [
        copy for inner in worker.backend.optimizer.chained_optimizers for copy in inner.get_parameters()
    ]
    sums = sum(float(copy.double().abs().sum()) for copy in copies)
    weights = [parameter for chunk in worker.backend.chunks for parameter in chunk.parameters()]
    own = sum(float(parameter.double().abs().sum()) for parameter in weights)
    return {name: as_bits(tensor) for name, tensor in full_tensors_of(worker)}, sums, own


def trained_then_exported(folder, overlap):
    from nemo_rl_mcore.rank.megatron import model as built

    ddp = {"overlap_grad_reduce": True, "overlap_param_gather": overlap}
    built.BUCKET_SIZE = 3000
    worker = tiny.worker(policy_of(folder, {"distributed_data_parallel_config": ddp}))
    data = tiny.grpo_batch(rows=4)
    worker.train(tiny.shard(data), tiny.grpo_loss())
    exported = {name: as_bits(tensor.clone()) for name, tensor in full_tensors_of(worker)}
    return exported, worker.get_reference_policy_logprobs(data=data)["reference_logprobs"].numpy()


def parts_read(folder, megatron):
    """How many bytes of each tensor this rank reads, and the bytes of its parameters."""
    from nemo_rl_mcore.rank.megatron.hf_weights.files import TensorFiles

    read, plain = {}, TensorFiles.read

    def counting(files, name, part):
        tensor = plain(files, name, part)
        read[name] = read.get(name, 0) + tensor.nbytes
        return tensor

    TensorFiles.read = counting
    try:
        worker = tiny.worker(policy_of(folder, megatron))
    finally:
        TensorFiles.read = plain
    parameters = sum(p.nbytes for chunk in worker.backend.chunks for p in chunk.parameters())
    return read, parameters


def load_after_a_change(folder):
    policy = policy_of(folder, {})
    config = Path(folder) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-3}))
    tiny.worker(policy)


def stepped(folder, megatron, sections, batches, adam):
    """The weights as Hugging Face's tensors after a step of AdamW on each batch."""
    optimizer = {"optimizer": {"weight_decay": 0.0} | adam}
    worker = tiny.worker(policy_of(folder, megatron | optimizer, max_grad_norm=0.0, **sections))
    for batch in batches:
        worker.train(tiny.shard(data_of(batch)), NLLLossFn())
    return {name: tensor.numpy().copy() for name, tensor in full_tensors_of(worker)}


def trained_on(folder, megatron, sections, batch):
    """Log-probabilities of a batch, and the gradients of its mean negative log-likelihood as Hugging Face's tensors."""
    # Every rank keeps all reduced gradients, and none is clipped.
    plain = {"optimizer": {"lr": 1e-2, "weight_decay": 0.0, "use_distributed_optimizer": False}}
    worker = tiny.worker(policy_of(folder, megatron | plain, max_grad_norm=0.0, **sections))
    data = data_of(batch)
    said = worker.get_logprobs(data=data)["logprobs"].numpy()
    step = worker.train(tiny.shard(data), NLLLossFn())
    # Gradients are laid out as the weights are.
    for chunk in worker.backend.chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
    gradients = {name: tensor.numpy().copy() for name, tensor in full_tensors_of(worker)}
    return said, step["all_mb_metrics"]["loss"][0], gradients


def gradient_norm(folder, megatron, batch):
    """The norm of the gradients of a batch's mean negative log-likelihood, as the step tells it."""
    worker = tiny.worker(policy_of(folder, megatron))
    return float(worker.train(tiny.shard(data_of(batch)), NLLLossFn())["grad_norm"])
