"""A worker's backend on a plain torch model of one rank: what a framework has to bring, in as few lines as will do."""

import copy
from contextlib import nullcontext

import torch
from safetensors.torch import save_file

from nemo_rl_mcore.data.batched_data_dict import digests_of_rows
from nemo_rl_mcore.losses.base import TokenOutputs
from nemo_rl_mcore.ops.sampling import keyed_uniforms, sample_tokens
from nemo_rl_mcore.rank.checkpoints import BackgroundWrite
from nemo_rl_mcore.rank.policy_backend import GeneratedRows, TopKLogits
from nemo_rl_mcore.rank.sums import LocalSums


class TorchBackend:
    """Each token's logits come from the sum of the embeddings so far. The learning rate falls with the samples."""

    device = torch.device("cpu")
    data_parallel_rank, data_parallel_size = 0, 1
    called_together = done_together = staticmethod(lambda _call: nullcontext())
    deferred_grad_sync = staticmethod(nullcontext)
    overlaps_grad_sync = False
    snapshot, restore = staticmethod(torch.get_rng_state), staticmethod(torch.set_rng_state)
    reduce = staticmethod(lambda sums: sums.reduce(lambda numbers: numbers[None]))
    keep_on_device = staticmethod(lambda _what: None)
    finalize_gradients = shutdown = staticmethod(lambda: None)

    def __init__(self, policy, options):
        torch.manual_seed(options.seed)
        self.policy, self.trained, self.temperature = policy, options.trained, options.sampling.temperature
        size = policy.model.vocab_size
        self.model = torch.nn.Sequential(torch.nn.Embedding(size, 16), torch.nn.Linear(16, size))
        self.optimizer, self.samples = torch.optim.SGD(self.model.parameters(), momentum=0.9), 0
        self.keep_reference()

    def _scaled_logits(self, ids_BS, model=None):
        model = model or self.model
        return model[1](model[0](ids_BS).cumsum(1)) / self.temperature

    @torch.no_grad()
    def logprobs(self, data, micro_batch_size, *, trained_only=False, of_reference=False):
        model = self.reference if of_reference else self.model
        every = self._scaled_logits(data["input_ids"], model).log_softmax(-1)
        found = _from_second(_of_next(every, data), data)
        return found * data["token_mask"] if trained_only else found

    def keep_reference(self):
        self.reference = copy.deepcopy(self.model)

    @torch.no_grad()
    def topk_logits(self, data, k, micro_batch_size, *, trained_only=False):
        logits = self._scaled_logits(data["input_ids"])
        best, total = logits.topk(k), logits.logsumexp(-1)
        tail = logits.scatter(2, best.indices, -torch.inf).logsumexp(-1) - total
        empty = torch.arange(logits.shape[1]) >= data["input_lengths"][:, None] - 1
        if trained_only:
            empty |= data["token_mask"].roll(-1, 1) == 0
        parts = best.values, best.indices, total, tail
        return TopKLogits(*(part.index_put((empty,), part.new_tensor(0)) for part in parts))

    @torch.no_grad()
    def values(self, data, micro_batch_size):
        return _from_second(self.model[0](data["input_ids"]).cumsum(1).mean(-1)[:, :-1], data)

    @torch.no_grad()
    def generate(self, request):
        rows, new = len(request.prompts), request.max_new_tokens
        found = GeneratedRows(torch.zeros(rows, new, dtype=torch.long), torch.zeros(rows, new),
                              torch.full((rows,), new), torch.zeros(rows, dtype=torch.bool),
                              torch.zeros(rows, dtype=torch.long))  # fmt: skip
        for row, prompt in enumerate(request.prompts):
            for i in range(new):
                logits = self._scaled_logits(torch.tensor([[*prompt, *found.tokens[row, :i].tolist()]]))
                logits, noise = logits[:, -1] * self.temperature, keyed_uniforms(request.keys_B[row, None], i)
                found.tokens[row, i], found.logprobs[row, i] = sample_tokens(logits, noise, request.sampling)
                if request.stops[row].met_by(found.tokens[row, : i + 1].tolist()):
                    found.lengths[row], found.finished[row] = i + 1, True
                    break
        found.digests.copy_(digests_of_rows(found.tokens, found.lengths))
        return found

    def forward_backward(self, data, loss_fn, micro_batch_size):
        total = LocalSums()
        for start in range(0, data.size, micro_batch_size):
            rows = data.slice(start, min(start + micro_batch_size, data.size))
            every = self._scaled_logits(rows["input_ids"]).log_softmax(-1)
            outputs = TokenOutputs(_of_next(every, rows), -(every.exp() * every).sum(-1)[:, :-1])
            sums = loss_fn.sums(outputs, rows)
            if torch.is_grad_enabled():
                sums.loss.backward()
            total.add(LocalSums.of(sums, rows))
        return total

    @torch.no_grad()
    def evaluate(self, data, loss_fn, micro_batch_size):
        return self.reduce(self.forward_backward(data, loss_fn, micro_batch_size))

    def zero_grad(self):
        self.optimizer.zero_grad()

    def scale_gradients(self, factor):
        for parameter in self.model.parameters():
            parameter.grad *= factor

    def gradient_norm(self):
        return float(torch.nn.utils.get_total_norm([x.grad for x in self.model.parameters()]))

    def optimizer_step(self, increment):
        self.optimizer.param_groups[0]["lr"] = self.learning_rate_and_weight_decay()[0]
        self.optimizer.step()
        self.samples += increment
        return True

    def learning_rate_and_weight_decay(self):
        return self.policy.megatron_cfg.optimizer.lr / (1 + self.samples), 0.01

    def save(self, folder, committed_step_ids, *, wait=True):
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty")
        folder.mkdir(exist_ok=True)
        parts = [copy.deepcopy(part.state_dict()) for part in (self.model, self.reference, self.optimizer)]
        state = (*parts, self.samples, torch.get_rng_state(), [*committed_step_ids])
        if not wait:
            return BackgroundWrite(lambda: torch.save(state, folder / "state.pt"))
        torch.save(state, folder / "state.pt")
        return None

    def load(self, folder):
        _, reference, moments, self.samples, generator, ids = self.load_weights(folder)
        self.reference.load_state_dict(reference)
        self.optimizer.load_state_dict(moments)
        torch.set_rng_state(generator)
        return ids

    def load_weights(self, folder, *, of_a_policy=False):
        if not (folder / "state.pt").exists():
            raise ValueError(f"{folder} is no checkpoint")
        state = torch.load(folder / "state.pt")
        self.model.load_state_dict(state[0])
        return state

    def full_tensors(self):
        yield from ((name, weight.detach()) for name, weight in self.model.named_parameters())

    def export_hf(self, folder, origin, *, adapters=False):
        assert not adapters
        if folder.exists():
            raise ValueError(f"{folder} exists already")
        folder.mkdir()
        save_file(dict(self.full_tensors()), folder / "model.safetensors")


def _of_next(every_BSV, data):
    return every_BSV[:, :-1].gather(2, data["input_ids"][:, 1:, None]).squeeze(2)


def _from_second(next_tokens, data):
    columns = torch.nn.functional.pad(next_tokens, (1, 0))
    return torch.where(torch.arange(columns.shape[1]) < data["input_lengths"][:, None], columns, 0.0)
