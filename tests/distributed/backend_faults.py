"""Faults of a backend, each with the check of `backend_contract` that must notice it: (check, method, its fault)."""

import torch
from torch_backend import TorchBackend

from nemo_rl_mcore.data.tokenizer import StopConditions


def nothing(*_args): ...


def logprobs_of_padding(self, data, micro_batch_size, **more):
    whole = {**data, "input_lengths": torch.full_like(data["input_lengths"], data["input_ids"].shape[1])}
    return TorchBackend.logprobs(self, whole, micro_batch_size, **more)


def logprobs_of_prompts(self, data, micro_batch_size, *, trained_only=False, of_reference=False):
    return TorchBackend.logprobs(self, data, micro_batch_size, of_reference=of_reference)


def unscaled(self, ids, model=None):
    return TorchBackend._scaled_logits(self, ids, model) * self.temperature


def tail_of_one(self, data, k, micro_batch_size, **more):
    best = TorchBackend.topk_logits(self, data, k, micro_batch_size, **more)
    best.tail_logmass.zero_()
    return best


def reference_is_the_policy(self, data, micro_batch_size, *, trained_only=False, of_reference=False):
    return TorchBackend.logprobs(self, data, micro_batch_size, trained_only=trained_only)


def policy_stays_swapped(self, data, micro_batch_size, *, trained_only=False, of_reference=False):
    if of_reference:
        self.model = self.reference
    return TorchBackend.logprobs(self, data, micro_batch_size, trained_only=trained_only)


def trains_in_evaluation(self, data, loss_fn, micro_batch_size):
    with torch.enable_grad():
        sums = self.forward_backward(data, loss_fn, micro_batch_size)
    self.optimizer_step(8)
    return self.reduce(sums)


def last_chunk_alone(self, data, loss_fn, micro_batch_size):
    self.zero_grad()
    return TorchBackend.forward_backward(self, data, loss_fn, micro_batch_size)


def without_moments(self, folder):
    moments = self.optimizer.state_dict()
    ids = TorchBackend.load(self, folder)
    self.optimizer.load_state_dict(moments)
    return ids


def without_schedule(self, folder):
    samples, ids = self.samples, TorchBackend.load(self, folder)
    self.samples = samples
    return ids


def noise_of_the_generator(self, request):
    request.keys_B.random_()
    return TorchBackend.generate(self, request)


def never_stopped(self, request):
    object.__setattr__(request, "stops", [StopConditions()] * len(request.prompts))
    return TorchBackend.generate(self, request)


def weights_of_the_start(self):
    return ((name, weight.detach()) for name, weight in self.reference.named_parameters())


def forgets_momentum(self, what):
    self.optimizer.state.clear()


def values_of_padding(self, data, micro_batch_size):
    return self.model[0](data["input_ids"]).mean(-1).detach()


FAULTS = (
    ("logprobs_are_those_of_the_next_token", "logprobs", logprobs_of_padding),
    ("the_temperature_divides_the_logits", "_scaled_logits", unscaled),
    ("topk_is_the_head_of_the_distribution", "topk_logits", tail_of_one),
    ("what_is_asked_of_trained_tokens_alone_is_0_elsewhere", "logprobs", logprobs_of_prompts),
    ("the_reference_stays_at_the_start", "logprobs", reference_is_the_policy),
    ("the_reference_stays_at_the_start", "logprobs", policy_stays_swapped),
    ("a_step_is_of_the_loss_over_all_valid_tokens", "evaluate", trains_in_evaluation),
    ("a_step_is_of_the_loss_over_all_valid_tokens", "scale_gradients", nothing),
    ("a_step_that_cannot_be_taken_moves_nothing", "zero_grad", nothing),
    ("a_split_step_is_the_whole_one", "forward_backward", last_chunk_alone),
    ("an_aborted_or_failed_step_leaves_no_trace", "restore", nothing),
    ("an_aborted_or_failed_step_leaves_no_trace", "zero_grad", nothing),
    ("a_loaded_checkpoint_goes_on_as_if_nothing_had_been", "load", without_moments),
    ("a_loaded_checkpoint_goes_on_as_if_nothing_had_been", "load", without_schedule),
    ("answers_are_drawn_from_the_policy", "generate", noise_of_the_generator),
    ("answers_are_drawn_from_the_policy", "generate", never_stopped),
    ("an_export_holds_the_present_weights", "full_tensors", weights_of_the_start),
    ("a_model_without_optimizer_reads_and_is_not_trained", "trained", property(lambda self: True, nothing)),
    ("what_leaves_the_device_comes_back_as_it_was", "keep_on_device", forgets_momentum),
    ("values_are_of_states_before_real_tokens", "values", values_of_padding),
)
