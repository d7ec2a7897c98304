"""The hook: the default path's loss and gradients through it, its refusal where it is missing, a short training."""

import pytest
import tiny
import torch
from refusals import assert_holds


def default_loss_against_hook(fused, tied):
    worker = tiny.worker(
        tiny.policy_config(
            model={"tie_word_embeddings": tied},
            megatron={"use_fused_linear_logprobs": fused},
            generation={"max_new_tokens": 4, "temperature": 1.0},
        )
    )
    from nemo_rl_mcore.rank.megatron.output_processor import TokenSelection

    model, batch = worker.backend.chunks[0], tiny.grpo_batch()
    ids, length = batch["input_ids"], batch["input_ids"].shape[1]
    inputs = ids, torch.arange(length).expand(len(ids), -1), torch.ones(1, 1, length, length).triu(1).bool()
    labels = ids.roll(-1, dims=1)
    gradients, losses = [], []
    for with_hook in (False, True):
        worker.backend.zero_grad()
        if with_hook:
            selection = TokenSelection(labels.t(), torch.ones_like(labels.t(), dtype=torch.bool))
            processor = worker.backend.forward.passes.token_processor
            output = model(*inputs, output_processor=processor, output_processor_context=selection)
            token_losses = -output.t()
        else:
            token_losses = model(*inputs, labels=labels)
        token_losses.mean().backward()
        losses.append(float(token_losses.detach().mean()))
        gradients.append({name: p.main_grad.clone() for name, p in model.named_parameters()})
    difference = max(float((gradients[0][n] - gradients[1][n]).abs().max()) for n in gradients[0])
    return losses, difference, max(float(g.abs().max()) for g in gradients[0].values())


@pytest.mark.smoke("fused-tied")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_hook_gives_the_default_loss_and_gradients(ranks, fused, tied):
    (losses, difference, largest) = ranks(1).run(default_loss_against_hook, fused, tied)[0]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert largest > 1e-2
    assert difference < 1e-6


def output_weight_gradients(tied):
    """The bf16 output weight's summed gradient, unfused and fused in chunks of five tokens."""
    gradients = []
    for fused in (False, True):
        worker = tiny.worker(
            tiny.policy_config(
                precision="bfloat16",
                train_micro_batch_size=8,
                model={"tie_word_embeddings": tied},
                megatron={"use_fused_linear_logprobs": fused, "fused_linear_logprobs_chunk_size": 5},
            )
        )
        worker.begin_train_step(tiny.grpo_loss(fused=fused), gbs=8, mbs=8)
        worker.train_microbatch(tiny.grpo_batch())
        model = worker.backend.chunks[0].module.module
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        gradients.append(weight.main_grad.clone())
    return gradients


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_fused_head_sums_its_gradient_in_the_fp32_bucket(ranks, tied):
    unfused, fused = ranks(1).run(output_weight_gradients, tied)[0]
    assert float((unfused - fused).norm() / unfused.norm()) < 1e-2
    # A gradient that had passed through autograd in the weight's dtype would be made of bf16 numbers.
    assert bool((unfused == unfused.bfloat16()).all())
    assert bool((fused != fused.bfloat16()).any())


def complaints_about_the_hook():
    """What the first passes say, of models that call the processor, ignore it, do not know it, or are no last stage."""
    from nemo_rl_mcore.rank.megatron.train_backend import require_hook

    class Calls(torch.nn.Module):
        post_process = True

        def forward(self, hidden, output_processor=None):
            return output_processor(hidden_states=hidden) if output_processor else hidden

    class Ignores(Calls):
        def forward(self, hidden, output_processor=None):
            return hidden

    class TakesAnything(Calls):
        def forward(self, hidden, **options):
            return super().forward(hidden, **options)

    class MiddleStage(Ignores):
        post_process = False

    class Older(Calls):
        def forward(self, hidden, labels=None):
            return hidden

    def complaint(model_class):
        model, told = model_class(), []
        # The second and the third pass hand a processor over; the last one runs after the check has ended or raised.
        for processor in (None, _doubled, _doubled):
            try:
                if processor is None:
                    require_hook([model])
                model(torch.ones(2), output_processor=processor)
                told.append("")
            except RuntimeError as error:
                told.append(str(error))
            except TypeError:
                told.append("TypeError")
        return told

    return {kind.__name__: complaint(kind) for kind in (Calls, TakesAnything, MiddleStage, Ignores, Older)}


def _doubled(*, hidden_states):
    return 2 * hidden_states


def test_a_megatron_that_does_not_call_the_processor_is_refused_with_the_version_that_does(ranks):
    (told,) = ranks(1).run(complaints_about_the_hook)
    for name in ("Calls", "TakesAnything", "MiddleStage"):
        assert told[name] == ["", "", ""], name
    at_first, *later = told["Ignores"]
    assert at_first == ""
    for message in later:
        assert_holds(message, "Ignores", "takes, and ignores", "megatron-core >= 0.18.0")
    assert_holds(told["Older"][0], "Older", "does not take", "megatron-core >= 0.18.0")


def hooks_of_a_model():
    """How many hooks the real model has before and after its first pass, and whether that pass gave the right shape."""
    worker = tiny.worker(tiny.policy_config())
    model = worker.backend.chunks[0].module

    def hooks():
        return len(model._forward_pre_hooks) + len(model._forward_hooks)

    before = hooks()
    worker.get_logprobs(data=tiny.grpo_batch())
    return before, hooks()


def test_the_first_pass_of_a_model_is_the_only_one_that_is_watched(ranks):
    assert ranks(1).run(hooks_of_a_model) == [(2, 0)]


@pytest.mark.parametrize("model_class", ["gpt", "hybrid"])
def test_mup_scale_is_applied_by_both_processors(ranks, model_class):
    unfused, fused, plain = ranks(1).run(scaled_logprobs, model_class)[0]
    assert fused == pytest.approx(unfused, abs=1e-5)
    assert abs(fused - plain).max() > 1e-2


def scaled_logprobs(model_class):
    results = []
    for fused, scale in ((False, 0.25), (True, 0.25), (True, 1.0)):
        worker = tiny.worker(
            tiny.policy_config(megatron={"use_fused_linear_logprobs": fused, "model_class": model_class})
        )
        worker.backend.config.use_mup, worker.backend.config.mup_output_mult = True, scale
        results.append(worker.get_logprobs(data=tiny.grpo_batch())["logprobs"].numpy())
    return results
