"""The hook: the default path's loss and gradients through it, its refusal where it is missing, what a pass asks for."""

import gc
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import tiny
import torch
from refusals import assert_holds

from nemo_rl_mcore.config import ClippedPGLossConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.microbatch import Microbatch
from nemo_rl_mcore.losses import ClippedPGLossFn, DistillationLossFn, NLLLossFn
from nemo_rl_mcore.ops._head import LogitsCache
from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions
from nemo_rl_mcore.ops.sampling import SamplingParams


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


each_class = pytest.mark.parametrize("model_class", ["gpt", "hybrid"])


def hooks_of_a_model(model_class):
    """How many hooks the real model has before and after its first pass, and whether that pass gave the right shape."""
    worker = tiny.worker(tiny.policy_config(megatron={"model_class": model_class}))
    model = worker.backend.chunks[0].module

    def hooks():
        return len(model._forward_pre_hooks) + len(model._forward_hooks)

    before = hooks()
    worker.get_logprobs(data=tiny.grpo_batch())
    return before, hooks()


@each_class
def test_the_first_pass_of_a_model_is_the_only_one_that_is_watched(ranks, model_class):
    assert ranks(1).run(hooks_of_a_model, model_class) == [(2, 0)]


@each_class
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


# Each position is asked for what belongs to its own next token


LAYOUT = (0, 2, 4, 1, 3)
"""The positions of a row in an order in which none has its next one beside it."""


def asked_of_the_model():
    """By (place in the layout, row): the target of each pass where it asks for one; then all teacher's ids."""
    from nemo_rl_mcore.rank.megatron.output_processor import unfused_processor
    from nemo_rl_mcore.rank.megatron.passes import Passes

    @dataclass(frozen=True)
    class Spread(Microbatch):
        def to_model(self, values_BS):
            return values_BS[:, list(LAYOUT)]

    def asked(kind):
        return kind.context(microbatch, microbatch.to_model(kind.wanted(microbatch.rows)))

    def targets(kind):
        tokens = asked(kind)
        return {(s, b): int(tokens.targets_SB[s, b]) for s, b in tokens.mask_SB.nonzero().tolist()}

    rows = BatchedDataDict(
        input_ids=torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 0, 0]]),
        input_lengths=torch.tensor([5, 3]),
        token_mask=torch.tensor([[0.0, 1, 1, 1, 1], [0, 0, 1, 0, 0]]),
        sample_mask=torch.ones(2),
        teacher_topk_indices=torch.arange(30).view(2, 5, 3),
    )
    microbatch = Spread(rows, torch.arange(2))
    passes = Passes(unfused_processor(32), SamplingParams(), linear_options=LinearLogprobsOptions())
    of_teacher = asked(passes.loss(DistillationLossFn({}))).ids_SBK.tolist()
    return targets(passes.logprobs()), targets(passes.loss(NLLLossFn())), of_teacher


def test_each_position_is_asked_for_what_belongs_to_its_own_next_token(ranks):
    ((read, trained, of_teacher),) = ranks(1).run(asked_of_the_model)
    assert read == {(0, 0): 11, (1, 0): 13, (3, 0): 12, (4, 0): 14, (0, 1): 21, (3, 1): 22}
    assert trained == {(0, 0): 11, (1, 0): 13, (3, 0): 12, (4, 0): 14, (3, 1): 22}
    for place, position in enumerate(LAYOUT):
        assert of_teacher[place] == [[15 * row + 3 * position + k for k in range(3)] for row in range(2)]


def logits_of_a_training_pass():
    """Positions whose logits an unfused training pass makes."""
    from megatron.core.utils import unwrap_model

    worker = tiny.worker(tiny.policy_config(megatron={"use_fused_linear_logprobs": False}))
    shapes = []
    layer = unwrap_model(worker.backend.chunks[0]).output_layer
    layer.register_forward_hook(lambda _module, inputs, _output: shapes.append(inputs[0].shape[:2].numel()))
    data = tiny.grpo_batch()
    worker.train(data, tiny.grpo_loss(), mbs=8)
    marked = int((data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum())
    return shapes, marked, data["input_ids"].numel()


def test_a_training_pass_has_logits_at_trained_tokens_alone(ranks):
    ((shapes, marked, every),) = ranks(1).run(logits_of_a_training_pass)
    assert shapes == [marked]
    assert marked < every


# Logits that the forward pass leaves to the backward pass: of one microbatch at a time


CACHE = {"use_fused_linear_logprobs": True, "fused_linear_logprobs_cache_bytes": 1 << 20}
FOUR_LAYERS = {"model": {"num_layers": 4}}
PIPELINE = {"pipeline_model_parallel_size": 2}
INTERLEAVED = PIPELINE | {"virtual_pipeline_model_parallel_size": 2}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16}
OVERLAP = {"expert_model_parallel_size": 2, "overlap_moe_expert_parallel_comm": True}
# Name: number of ranks, and sections of the policy.
LAYOUTS = {
    "one rank": (1, {}, {}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "pp2": (2, PIPELINE, {}),
    "pp2-vpp2": (2, INTERLEAVED, FOUR_LAYERS),
    "ep2-overlap": (2, OVERLAP, {"model": EXPERTS, "precision": "bfloat16"}),
    "pp2-vpp2-overlap": (
        4,
        INTERLEAVED | OVERLAP,
        {"model": EXPERTS | {"num_layers": 4}, "precision": "bfloat16"},
    ),
}


def held():
    gc.collect()
    return sum(type(x) is LogitsCache and bool(x._panels) for x in gc.get_objects())


def watching(loss_class, most, fails=False):
    class Watching(loss_class):
        def sums(self, outputs, data):
            most.append(held())
            if fails and len(most) > 2:
                raise ValueError("a loss that fails")
            return super().sums(outputs, data)

    return Watching


def watched_step(megatron, sections, fails):
    """Caches that hold logits when a microbatch has its loss, at most; and after the step, or its abort."""
    most = [0]
    loss_fn = watching(ClippedPGLossFn, most, fails)(ClippedPGLossConfig(), use_fused_linear_logprobs=True)
    worker = tiny.worker(tiny.policy_config(megatron=CACHE | megatron, train_micro_batch_size=1, **sections))
    worker.begin_train_step(loss_fn, mbs=1)
    with pytest.raises(ValueError, match="a loss that fails") if fails else nullcontext():
        worker.train_microbatch(tiny.shard(tiny.grpo_batch()))
    worker.abort_train_step()
    after = held()
    worker.get_logprobs(data=tiny.shard(tiny.grpo_batch()))
    return max(most), after, held()


@pytest.mark.quick_cases("one rank")
@pytest.mark.exhaustive_cases("pp2-vpp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_of_one_microbatch_are_kept_at_a_time(ranks, layout):
    world_size, megatron, sections = LAYOUTS[layout]
    seen = ranks(world_size).run(watched_step, megatron, sections, False)
    assert max(most for most, *_ in seen) == 1
    assert all(after == [0, 0] for _, *after in seen)


def test_a_step_that_fails_and_is_aborted_keeps_none(ranks):
    [(most, *after)] = ranks(1).run(watched_step, {}, {}, True)
    assert (most, after) == (1, [0, 0])
