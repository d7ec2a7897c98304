"""What NeMo RL computes in a run, written from its formulas in plain PyTorch over a transformers model."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

type Row = tuple[Sequence[int], Sequence[bool]]
"""Ids, and whether each is trained on."""
EPSILON = 1e-6
"""Added to the deviation of rewards."""
CLIPPED = 1e-6
"""Added to the norm of gradients, by Megatron."""


@dataclass(frozen=True)
class Faults:
    """Mistakes to make on purpose, for a comparison to find."""

    ticks: float = 1.0
    leave_one_out: bool = True
    normalize: bool = True
    denominator: str = "batch"
    """batch; or rows: the mean of each row alone, and then of them; or pairs, which counts both rows of a pair."""
    imitated: str = "theirs"
    """theirs; or answer: no more than the answer and its end of sequence; or unended: without an end of sequence."""


def rate(recipe: Mapping[str, Any], ticks: float) -> float:
    schedule, peak = recipe["scheduler"], recipe["optimizer"]["lr"]
    low, warmup, end = recipe["optimizer"]["min_lr"], schedule["lr_warmup_iters"], schedule["lr_decay_iters"]
    if warmup and ticks <= warmup:
        return schedule["lr_warmup_init"] + (peak - schedule["lr_warmup_init"]) * ticks / warmup
    if schedule["lr_decay_style"] == "constant":
        return peak
    done = min(1.0, (ticks - warmup) / (end - warmup))
    shape = {"linear": 1 - done, "cosine": 0.5 * (math.cos(math.pi * done) + 1)}
    return low + (peak - low) * shape[schedule["lr_decay_style"]]


def advantages(rewards: torch.Tensor, faults: Faults) -> torch.Tensor:
    """Of the answers to one prompt: each reward over the others' mean, in units of the others' deviation."""
    found = torch.zeros_like(rewards)
    for place, reward in enumerate(rewards):
        others = torch.cat([rewards[:place], rewards[place + 1 :]]) if faults.leave_one_out else rewards
        spread = others.var(correction=1).clamp(min=0).sqrt()
        found[place] = reward - others.mean()
        if faults.normalize and spread > 0:
            found[place] /= spread + EPSILON
    return found


@dataclass
class Rows:
    """Token rows: ids [N, S], padded by 0, whether each is trained on [N, S], and lengths [N]."""

    ids: torch.Tensor
    mask: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Rows:
        lengths = torch.tensor([len(ids) for ids, _ in rows])
        whole = cls(
            *(torch.zeros(len(rows), int(lengths.max()), dtype=kind) for kind in (torch.long, torch.float)),
            lengths,
        )
        for place, (ids, mask) in enumerate(rows):
            whole.ids[place, : len(ids)] = torch.tensor(ids)
            whole.mask[place, : len(mask)] = torch.tensor(mask, dtype=torch.float)
        return whole

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.ids[rows], self.mask[rows], self.lengths[rows])


def conversation(tokenizer: Any, messages: Sequence[dict[str, str]], *, opened: bool, faults: Faults) -> Row:
    """A row of a conversation: the template's text, message by message, of which the last is trained on."""
    ids, mask, before = list[int](), list[bool](), ""
    for place, message in enumerate(messages):
        last = place == len(messages) - 1
        text = tokenizer.apply_chat_template(
            [*messages[: place + 1]],
            tokenize=False,
            add_generation_prompt=opened and message["role"] == "user",
        )
        chunk = text[len(before) :]
        ends = chunk.rstrip("\n").endswith(tokenizer.eos_token) or faults.imitated == "unended"
        if last and not ends:
            chunk += tokenizer.eos_token
        token_ids = tokenizer(chunk, add_special_tokens=False)["input_ids"]
        trained = [last] * len(token_ids)
        if last and faults.imitated == "answer":
            opening = tokenizer.apply_chat_template(
                [*messages[:-1]], tokenize=False, add_generation_prompt=True
            )
            start = len(tokenizer(opening[len(before) :], add_special_tokens=False)["input_ids"])
            end = token_ids.index(tokenizer.eos_token_id) + 1
            trained = [start <= place < end for place in range(len(token_ids))]
        ids, mask, before = [*ids, *token_ids], [*mask, *trained], text
    return ids, mask


@dataclass
class Trainer:
    """The model, its optimizer and its schedule; a step is the optimizer steps of one call of `train`."""

    recipe: Mapping[str, Any]
    folder: Path
    steps: int
    faults: Faults = field(default_factory=Faults)
    calls: int = 0

    def __post_init__(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.reference = copy.deepcopy(self.model).requires_grad_(False)
        named = [*self.model.named_parameters()]
        optimizer = self._megatron["optimizer"]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for _, p in named if p.ndim > 1], "weight_decay": optimizer["weight_decay"]},
                {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=optimizer["lr"],
            betas=(optimizer["adam_beta1"], optimizer["adam_beta2"]),
            eps=optimizer["adam_eps"],
        )

    @property
    def _megatron(self) -> Mapping[str, Any]:
        return self.recipe["policy"]["megatron_cfg"]

    def rate(self, optimizer_step: int) -> float:
        """Each optimizer step of a call has its share here of the one tick that a call is there."""
        return rate(self._megatron, (self.calls + optimizer_step / self.steps) * self.faults.ticks)

    def logprobs(self, rows: Rows, model: Any = None) -> torch.Tensor:
        """Of each token [N, S]; column 0 is 0."""
        every = (model or self.model)(rows.ids, attention_mask=_attended(rows)).logits.log_softmax(-1)
        return torch.nn.functional.pad(every[:, :-1].gather(2, rows.ids[:, 1:, None]).squeeze(2), (1, 0))

    def apply(self, loss: torch.Tensor, optimizer_step: int) -> float:
        """One optimizer step, with the norm of gradients that the recipe allows; return the norm before it."""
        self.optimizer.zero_grad()
        loss.backward()
        parameters = [*self.model.parameters()]
        norm = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum().sqrt()
        most = self._megatron["optimizer"]["clip_grad"]
        for parameter in parameters:
            if parameter.grad is not None and most and norm > most:
                parameter.grad *= most / (norm + CLIPPED)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(optimizer_step)
        self.optimizer.step()
        return float(norm)


def _attended(rows: Rows) -> torch.Tensor:
    return (torch.arange(rows.ids.shape[1]) < rows.lengths.unsqueeze(1)).long()


def token_mean(values: torch.Tensor, mask: torch.Tensor, faults: Faults) -> torch.Tensor:
    if faults.denominator == "rows":
        return ((values * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
    return (values * mask).sum() / mask.sum()


def clipped_loss(
    now: torch.Tensor, before: torch.Tensor, reference: torch.Tensor, gains: torch.Tensor, mask: torch.Tensor,
    loss: Mapping[str, Any], faults: Faults,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """PPO's clipped objective, and k3 to the reference, both over all tokens of a batch; all are [N, S]."""
    ratio = (now - before).exp()
    clipped = ratio.clamp(1 - loss["ratio_clip_min"], 1 + loss["ratio_clip_max"])
    actor = token_mean(torch.maximum(-gains * ratio, -gains * clipped), mask, faults)
    apart = (reference - now).clamp(-loss["kl_input_clamp_value"], loss["kl_input_clamp_value"])
    weights = (now - now.detach()).exp()
    k3 = (weights * (apart.exp() - 1 - apart)).clamp(
        -loss["kl_output_clamp_value"], loss["kl_output_clamp_value"]
    )
    return actor, token_mean(k3, mask, faults)


def preference_loss(
    now: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, dpo: Mapping[str, Any], faults: Faults
) -> torch.Tensor:
    """DPO of rows that are chosen and rejected in turns, with the likelihood of the chosen ones."""
    rewards = ((now - reference) * mask).sum(1)
    apart = dpo["reference_policy_kl_penalty"] * (rewards[::2] - rewards[1::2])
    chosen = -(now * mask).sum(1)[::2]
    pairs = len(apart) * (2 if faults.denominator == "pairs" else 1)
    preferred = -torch.nn.functional.logsigmoid(apart).sum() / pairs
    return dpo["preference_loss_weight"] * preferred + dpo["sft_loss_weight"] * chosen.sum() / pairs
