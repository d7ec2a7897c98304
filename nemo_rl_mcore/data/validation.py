"""Checks of a batch before it is sent or enters a collective: all problems at once, by key and row.

Shapes: B rows, S columns of input_ids, K choices per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.config.policy import TokenBudgets
from nemo_rl_mcore.data.batched_data_dict import EPISODE, NO_ROUTE, ROUTED_EXPERTS, BatchedDataDict
from nemo_rl_mcore.data.columns import Column, ColumnKind
from nemo_rl_mcore.errors import RefusedError

_SHOWN_ROWS = 8


def check_lengths(input_lengths: Tensor, policy: PolicyConfig) -> None:
    """Raise ValueError for a prompt of `input_lengths` [B] that leaves no room for a whole response."""
    new, longest = policy.reserved_tokens, policy.max_total_sequence_length
    lengths = cast("list[int]", input_lengths.tolist())  # pyright: ignore[reportUnknownMemberType]
    for row, length in enumerate(lengths):
        if length + new > longest:
            raise RefusedError(
                f"row {row} has a prompt of {length} tokens, which {new} of policy.generation.max_new_tokens take "
                f"to {length + new}, past policy.max_total_sequence_length: {longest}; shorten the prompt or change "
                "one of the two",
                code="prompt-length",
            )


@dataclass(frozen=True)
class Finding:
    """A problem with a key of the batch, or with rows if `key` is empty; code: the broken rule's."""

    code: str
    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what}" if self.key else self.what


class BatchError(RefusedError):
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class BatchCheck:
    """A model's limits. Each method raises one BatchError with all of a batch's problems.

    Row numbers are those of the given batch: the caller's on the driver, the shard's on a rank. Ranks with the same
    shard find the same problems; a data-parallel peer, with other rows, may find none.

    vocab_size, positions: the model's. budgets: tokens per microbatch, and thus the maximum per row; None for
    microbatches of a fixed number of rows. layers: the part of the model that needs lengths in training, if any.
    routes: numbers of MoE layers, of experts per token and of experts, for router replay; None without it.
    """

    vocab_size: int
    positions: int
    budgets: TokenBudgets | None = None
    layers: str | None = None
    routes: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, policy: PolicyConfig) -> Self:
        model = policy.model
        layers = {
            "the load-balancing loss of experts": model.load_balancing_loss,
            "the bias of experts": model.moe_router_enable_expert_bias,
            "multi-token prediction": model.mtp_num_layers,
        }
        needing = next((name for name, present in layers.items() if present), None)
        routes = None
        if policy.router_replay.enabled:
            routes = len(model.expert_layers), model.moe_router_topk, model.num_moe_experts or 0
        return cls(model.vocab_size, model.shape.longest_sequence, policy.token_budgets, needing, routes)

    def reading(self, data: BatchedDataDict, *, k: int | None = None, trained_only: bool = False) -> None:
        """Check a pass with a value for every token, or only for those in token_mask; k: number of choices."""
        found = _Findings(data)
        tokens = None if self.budgets is None else ("logprob_mb_tokens", self.budgets.logprob)
        lengths_B = self._inputs(found, "a pass without a loss", budget=tokens)
        if trained_only:
            _token_mask(found, lengths_B)
        if ROUTED_EXPERTS in data:
            self._routes(found)
        if k is not None and not 1 <= k <= self.vocab_size:
            found.note("k", "k", f"{k}; allowed: 1 to {self.vocab_size} (model.vocab_size)")
        found.refuse()

    def prompts(self, data: BatchedDataDict) -> None:
        """Check prompts of one token or more; turn_index [B] and stop_strings, a tuple per row, are optional."""
        found = _Findings(data)
        self._inputs(found, "generation", shortest=1)
        for key in ("prompt_index", "sample_index", *({"turn_index"} & data.keys())):
            found.tensor(key, "the noise of sampling", "B")
        for row, strings in enumerate(data.get("stop_strings", ())):
            if "" in strings:
                what = f"an empty text in row {row} would end its answer at once; leave it out"
                found.note("empty-text", "stop_strings", what)
        found.refuse()

    def training(
        self,
        data: BatchedDataDict,
        columns: Iterable[Column],
        rows_per_sample: int = 1,
        *,
        eval_mode: bool = False,
    ) -> None:
        """Check whole samples for a loss that reads these columns."""
        found = _Findings(data)
        needed_by, tokens = None if eval_mode else self.layers, None
        if self.budgets is not None:
            needed_by = self.budgets.section
            tokens = "train_mb_tokens", self.budgets.of_training(rows_per_sample)
        lengths_B = self._inputs(found, needed_by, budget=tokens)
        # In padded rows the mask alone decides; another layout has no padding to train on.
        tokens_BS = _token_mask(found, None if self.budgets is None else lengths_B)
        samples_B = found.mask("sample_mask", "B")
        if data.size % rows_per_sample:
            what = f"{data.size} rows; allowed: whole samples of {rows_per_sample} rows"
            found.note("rows-per-sample", "", what)
            samples_B = None
        if EPISODE in data:
            _episodes(found, samples_B, rows_per_sample)
        counts = dict[str, Tensor]()
        if tokens_BS is not None and samples_B is not None:
            # Losses read a column where token_mask is 1, but for the first token, in samples with any sample_mask of 1.
            of_samples = (samples_B != 0).view(-1, rows_per_sample).any(dim=1)
            counts_B = of_samples.repeat_interleave(rows_per_sample)
            next_BS = ((tokens_BS != 0) & counts_B.unsqueeze(1))[:, 1:]
            counts = {
                "samples": counts_B,
                "tokens": pad(next_BS, (1, 0)),
                "next tokens": pad(next_BS, (0, 1)),
            }
        for column in columns:
            if column.key in data or not column.optional:
                self._column(found, column, counts)
        self._routes(found)
        found.refuse()

    @property
    def ids(self) -> str:
        return f"0 to {self.vocab_size - 1} (model.vocab_size: {self.vocab_size})"

    def _inputs(
        self,
        found: _Findings,
        lengths_needed_by: str | None,
        *,
        shortest: int = 0,
        budget: tuple[str, int] | None = None,
    ) -> Tensor | None:
        """Check ids and lengths, and return the lengths; budget: a key of the budgets' section, and its tokens."""
        ids_BS = found.tensor("input_ids", "every pass", "BS")
        if ids_BS is not None and ids_BS.dtype not in (torch.int64, torch.int32):
            found.note_dtype("input_ids", ids_BS, "int64")
        elif ids_BS is not None:
            # Padding included: the embedding looks it up.
            outside_BS = (ids_BS < 0) | (ids_BS >= self.vocab_size)
            found.values("vocabulary", "input_ids", ids_BS, outside_BS, self.ids)
        columns = self.positions if ids_BS is None else ids_BS.shape[1]
        longest = f"rows of at most {self.positions} tokens (model.max_position_embeddings)"
        if lengths_needed_by is None and "input_lengths" not in found.data:
            if columns > self.positions:
                what = f"{columns} columns without input_lengths; allowed: {longest}"
                found.note("positions", "input_ids", what)
            return None
        lengths_B = found.tensor("input_lengths", lengths_needed_by or "nothing", "B")
        if lengths_B is not None:
            inside = (lengths_B >= shortest) & (lengths_B <= columns)
            allowed = f"{shortest} to {columns}, the columns of input_ids"
            found.values("columns", "input_lengths", lengths_B, ~inside, allowed)
            found.values("positions", "input_lengths", lengths_B, lengths_B > self.positions, longest)
            if self.budgets is not None and budget is not None:
                allowed = (
                    f"rows of at most {budget[1]} tokens ({self.budgets.section}.{budget[0]}: {budget[1]})"
                )
                found.values("token-budget", "input_lengths", lengths_B, lengths_B > budget[1], allowed)
        return lengths_B

    def _routes(self, found: _Findings) -> None:
        """Check the routes that the pass replays, if any."""
        if self.routes is None:
            return
        found.sizes["L"], found.sizes["K"], experts = self.routes
        routes = found.tensor(ROUTED_EXPERTS, "policy.router_replay", "BSLK")
        if routes is None or not routes.numel():
            return
        if routes.is_floating_point():
            found.note_dtype(ROUTED_EXPERTS, routes, "integers")
            return
        lowest_B, highest_B = routes.flatten(1).aminmax(dim=1)
        allowed = f"experts from 0 to {experts - 1}, or {NO_ROUTE} for tokens to be routed as usual"
        found.values("experts", ROUTED_EXPERTS, lowest_B, lowest_B < NO_ROUTE, allowed)
        found.values("experts", ROUTED_EXPERTS, highest_B, highest_B >= experts, allowed)

    def _column(self, found: _Findings, column: Column, counts: Mapping[str, Tensor]) -> None:
        """Check a column's dtype and shape and, given counts, its values at tokens that count."""
        values = found.tensor(column.key, column.needed_by, column.shape)
        of_ids = column.kind is ColumnKind.TOKEN_IDS
        if values is None or column.kind is ColumnKind.NUMBERS:
            return
        if values.is_floating_point() == of_ids or values.dtype == torch.bool or values.is_complex():
            found.note_dtype(column.key, values, "integers" if of_ids else "floating-point numbers")
        elif counts:
            code, allowed = column.kind.name.lower().replace("_", "-"), column.kind.value
            if of_ids:
                code, allowed = "vocabulary", self.ids
                wrong = (values < 0) | (values >= self.vocab_size)
            elif column.kind is ColumnKind.BELOW_INFINITY:
                wrong = torch.isnan(values) | (values == torch.inf)
            else:
                wrong = ~torch.isfinite(values)
            where = "next tokens" if column.of_next_token else "tokens"
            counting = counts["samples" if column.shape == "B" else where]
            wrong = wrong & counting[(...,) + (None,) * (wrong.ndim - counting.ndim)]
            found.values(code, column.key, values, wrong, f"{allowed}, wherever a token counts")


def _token_mask(found: _Findings, lengths_B: Tensor | None) -> Tensor | None:
    """Check token_mask and, given lengths, that no token beyond them counts."""
    mask_BS = found.mask("token_mask", "BS")
    if mask_BS is not None and lengths_B is not None:
        behind_BS = torch.arange(mask_BS.shape[1]) >= lengths_B.clamp(min=0).unsqueeze(1)
        known_BS = (lengths_B >= 0).unsqueeze(1)  # a wrong length or mask is noted already
        marked_BS = behind_BS & known_BS & (mask_BS == 1)
        found.values("padding", "token_mask", mask_BS, marked_BS, "0 after input_lengths")
    return mask_BS


def _episodes(found: _Findings, samples_B: Tensor | None, rows_per_sample: int) -> None:
    """Check that an episode's rows are neighbours, and that sample_mask is the same for all of them."""
    if rows_per_sample > 1:
        what = f"given; allowed: none beside a loss that reads {rows_per_sample} rows together"
        found.note("rows-per-sample", EPISODE, what)
    numbers_B = found.tensor(EPISODE, "nothing", "B")
    if numbers_B is None:
        return
    if numbers_B.dtype != torch.int64:
        return found.note_dtype(EPISODE, numbers_B, "int64")
    order = numbers_B.argsort(stable=True)
    same = numbers_B[order].diff() == 0
    apart_B, differs_B = torch.zeros(2, len(order), dtype=torch.bool)
    apart_B[order[1:]] = same & (order.diff() != 1)
    found.values("episode-apart", EPISODE, numbers_B, apart_B, "the rows of an episode one after the other")
    if samples_B is not None:
        differs_B[order[1:]] = same & (samples_B[order].diff() != 0)
        allowed = f"one number for all rows of an episode ({EPISODE})"
        found.values("episode-mask", "sample_mask", samples_B, differs_B, allowed)


@dataclass
class _Findings:
    """A batch's problems; sizes: known sizes, by the letters of a shape."""

    data: BatchedDataDict
    findings: list[Finding] = field(default_factory=list[Finding])
    sizes: dict[str, int] = field(default_factory=dict[str, int])

    def tensor(self, key: str, needed_by: str, shape: str) -> Tensor | None:
        """Return the key's tensor; if it is missing, not a tensor or of another shape, note this and return None."""
        value = self.data.get(key)
        if value is None:
            self.note("missing", key, f"missing, and {needed_by} needs it; the batch has {sorted(self.data)}")
        elif not isinstance(value, Tensor):
            self.note("no-tensor", key, f"a {type(value).__name__}; allowed: a tensor")
        elif value.ndim != len(shape) or any(
            self.sizes.setdefault(letter, size) != size
            for letter, size in zip(shape, value.shape, strict=True)
        ):
            wanted = ", ".join(str(self.sizes.get(letter, letter)) for letter in shape)
            self.note("shape", key, f"shape {list(value.shape)}; allowed: [{wanted}]")
        else:
            return value
        return None

    def mask(self, key: str, shape: str) -> Tensor | None:
        mask = self.tensor(key, "every loss", shape)
        if mask is not None:
            self.values("mask", key, mask, (mask != 0) & (mask != 1), "0 and 1")
        return mask

    def values(self, code: str, key: str, values: Tensor, wrong: Tensor, allowed: str) -> None:
        """Note the rows in which `wrong` is true anywhere, with one such value."""
        if not wrong.any():
            return
        of_row = wrong.reshape(len(wrong), -1).any(dim=1)
        rows: list[int] = of_row.nonzero().flatten().tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        shown = ", ".join(map(str, rows[:_SHOWN_ROWS]))
        more = f" and {len(rows) - _SHOWN_ROWS} more" if len(rows) > _SHOWN_ROWS else ""
        example = values[wrong][0].item()
        self.note(code, key, f"{example} in row{'s' * (len(rows) > 1)} {shown}{more}; allowed: {allowed}")

    def note(self, code: str, key: str, what: str) -> None:
        self.findings.append(Finding(code, key, what))

    def note_dtype(self, key: str, values: Tensor, allowed: str) -> None:
        self.note("dtype", key, f"{str(values.dtype).removeprefix('torch.')}; allowed: {allowed}")

    def refuse(self) -> None:
        if self.findings:
            error = BatchError("\n  ".join(["the batch is refused:", *map(str, self.findings)]), code="batch")
            error.findings = tuple(self.findings)
            raise error
