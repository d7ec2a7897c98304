"""What rollouts need of generation engines and environments; no framework is named here.

B rows, P prompt length, T new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.turns import Reply, Turn


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
        """Any of them has weights; while none has, no group is asked for."""
        ...

    @property
    def joining(self) -> bool:
        """`rejoin` is to be called: one that restarted has no weights, or the run is to end."""
        ...

    @property
    def restarts(self) -> int:
        """Times that one of them was restarted, since the run began."""
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
        """Turns that were dropped since the run began, by the reason."""
        ...
