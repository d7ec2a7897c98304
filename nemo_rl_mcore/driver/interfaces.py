"""What an algorithm needs of models, generation engines and environments; no framework is named here.

B rows, P prompt length, S sequence length, T new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.turns import Reply, Turn

if TYPE_CHECKING:
    from nemo_rl_mcore.losses.base import LossFunction


class TrainedModel(Protocol):
    """A model over all its ranks: whole batches in, whole batches out."""

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        *,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Take optimizer steps over the batch; the keys are those of `MegatronPolicyWorker.finish_train_step`.

        gbs, mbs: rows of an optimizer step and of a microbatch, whole samples of the loss; None is the config's, which
        counts samples. Under `eval_mode` nothing is updated, and all rows are one batch, whatever gbs.
        """
        ...

    def begin_train_step(
        self,
        loss_fn: LossFunction,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        step_id: str | None = None,
    ) -> None:
        """Open one optimizer step, to which chunks are then added; a `step_id` that was committed is refused.

        gbs, mbs: see `train`; the scheduler advances by the samples of `gbs` rows, whatever the chunks hold.
        """
        ...

    def train_microbatch(self, data: BatchedDataDict, *, chunk_id: str | None = None) -> None:
        """Add a chunk of any number of whole samples to the open step; a `chunk_id` that was added is refused."""
        ...

    def finish_train_step(self) -> dict[str, Any]:
        """Update the weights by the mean over all chunks' tokens (or sequences); the keys are those of `train`."""
        ...

    def abort_train_step(self) -> None:
        """Drop the open or failed step, which then leaves no trace; nothing to do when none is open."""
        ...

    def save_checkpoint(self, folder: str, *, wait: bool = True) -> None:
        """Write all that the next step depends on into a folder that every rank sees.

        Without `wait` a copy is taken, and written while other calls go on; see `checkpoint_written`. The next save
        waits for it.
        """
        ...

    def checkpoint_written(self, *, wait: bool = True) -> float | None:
        """Return the seconds that writing the last copy took, None while it goes on; `wait` until it is written.

        Raises what writing it raised.
        """
        ...

    def load_checkpoint(self, folder: str, *, weights_only: bool = False) -> None:
        """Set everything back that `save_checkpoint` wrote; with `weights_only` moments and schedule stay as they are.

        The layout may be another one. Raises when the folder does not hold a checkpoint of this model.
        """
        ...

    @property
    def updates(self) -> int:
        """Optimizer steps, skipped ones too, whose results were given since the start or the last `load_checkpoint`."""
        ...

    def has_unknown_update(self) -> bool:
        """Return whether a rank took an optimizer step whose result was not given, since it or another one raised."""
        ...

    def serves(self) -> bool:
        """Return whether all ranks answer."""
        ...

    def restart(self) -> None:
        """Put new ranks in place of those there are, with the weights that the run began with."""
        ...


class ValueInterface(TrainedModel, Protocol):
    """A critic."""

    def get_values(self, data: BatchedDataDict) -> BatchedDataDict:
        """Return {"values": fp32 [B, S]}, column i of the state before token i."""
        ...


class PolicyInterface(TrainedModel, Protocol):
    """A policy."""

    def get_logprobs(self, data: BatchedDataDict, *, trained_only: bool = False) -> BatchedDataDict:
        """Return {"logprobs": fp32 [B, S]}, column i about token i.

        trained_only, here and below: only of tokens that token_mask [B, S] marks; 0 elsewhere, where no loss reads.
        """
        ...

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, *, trained_only: bool = False
    ) -> BatchedDataDict:
        """Return {"reference_logprobs": fp32 [B, S]} of the weights at the start of the run."""
        ...

    def get_topk_logits(
        self, data: BatchedDataDict, k: int, *, trained_only: bool = False
    ) -> BatchedDataDict:
        """Return the k most probable next tokens at each position; the keys are those of `MegatronPolicyWorker`."""
        ...

    def generate(
        self, data: BatchedDataDict, *, step: int, stop_ids: Sequence[int], greedy: bool
    ) -> BatchedDataDict:
        """Answer prompts; see `GenerationInterface.generate`."""
        ...


class GenerationInterface(Protocol):
    """An engine that answers prompts."""

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        """Answer prompts: tokens int64 [B, T], logprobs fp32 [B, T], lengths [B], finished bool [B].

        Also digests int64 [B] of the tokens of each row, taken where they were drawn; see `data.token_digests`.

        data: input_ids [B, P], input_lengths [B], prompt_index and sample_index int64 [B]; optional are turn_index
        int64 [B], 0 for the first answer of an episode, and stop_strings, a list of a tuple a row, which end it besides
        those of the recipe. The noise of a row depends on (seed, step, prompt_index, sample_index, turn_index) alone.
        """
        ...

    def update_weights(self, version: int) -> None:
        """Wake, and answer with the policy's weights as they are now, called this version; versions never fall."""
        ...

    def offload(self) -> None:
        """Sleep until the next `update_weights`: where the two share memory, training has it."""
        ...


class RolloutEngines(GenerationInterface, Protocol):
    """Engines apart from the ranks, which answer group by group while the ranks train and weights change.

    `respond` is called from one asyncio loop, the other methods from other threads meanwhile. Both ways to ask are
    needed: `generate` spreads many rows of one version over all engines, `respond` asks one for a group of any version.
    """

    @property
    def weights_digest(self) -> str:
        """Of the weights that were given last, equal for equal bits; empty where none is taken."""
        ...

    def whereabouts(self, ticket: str) -> str:
        """Return who answers a group, and what it was at last; empty where nobody does. Any thread may ask."""
        ...

    @property
    def answering(self) -> bool:
        """Return whether any of them has weights; while none has, no group is asked for."""
        ...

    @property
    def joining(self) -> bool:
        """Return whether `rejoin` is to be called: one that restarted has no weights, or the run is to end."""
        ...

    @property
    def restarts(self) -> int:
        """Return how often one of them was restarted, since the run began."""
        ...

    async def respond(self, data: BatchedDataDict, *, step: int, ticket: str) -> BatchedDataDict:
        """As `generate`, with weight_versions int64 [B, T] of the weights that sampled each token, -1 after the end.

        ticket: what messages and the engine call this group of rows. A task that is cancelled gives it up. Raises
        EngineFailedError when the group is not answered, and EngineDiedError when that is no fault of its own; any
        other RunStoppedError ends the run.
        """
        ...

    def rejoin(self) -> None:
        """Give the weights of the last version to engines that restarted, while the others go on answering.

        Called by the thread that trains, between two calls to the ranks, whose weights are still of that version.
        Raises what ends the run, when an engine was lost and is not started again.
        """
        ...

    def listen(self, changed: Callable[[], None]) -> None:
        """Have this called, from any thread, whenever `answering` or `joining` may have changed."""
        ...


class Environments(Protocol):
    """The environments of a run, wherever they run: each turn has a reply, or is dropped, whatever becomes of them.

    Two ways to ask: a thread that trains must hear signals and say what it waits for, an asyncio loop must not block.
    """

    async def replies_soon(self, turns: Sequence[Turn]) -> Sequence[Reply]:
        """Return the reply to each turn, in their order, without blocking the loop. Raises what ends the run."""
        ...

    def replies(self, turns: Sequence[Turn]) -> Sequence[Reply]:
        """Do as `replies_soon`, for the thread that trains, which waits."""
        ...

    def take_counts(self) -> Mapping[str, float]:
        """Return counts since the last call, as `env/NAME`: turns dropped and asked again, environments restarted.

        Empty where none of it can happen.
        """
        ...

    @property
    def drop_reasons(self) -> Mapping[str, int]:
        """Return why turns were dropped, and how many for each reason, since the run began."""
        ...
