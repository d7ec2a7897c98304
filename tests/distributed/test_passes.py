"""What a pass asks of the model is laid out by the microbatch, and shifted before."""

from dataclasses import dataclass

import tiny
import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.microbatch import Microbatch
from nemo_rl_mcore.losses import DistillationLossFn, NLLLossFn
from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions

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
    passes = Passes(unfused_processor(32), temperature=1.0, linear_options=LinearLogprobsOptions())
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
