"""Sampling and training take turns: the groups of a step are answered in one call, then the step trains on them.

A run without asynchronous rollouts: its largest staleness is 0. The engine may be the ranks themselves, or engines that
share their devices: it is asleep while the ranks compute. There is one thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from nemo_rl_mcore.driver.interfaces import GenerationInterface
from nemo_rl_mcore.driver.rollouts.events import Token
from nemo_rl_mcore.driver.rollouts.scheduler import Scheduler

SURPLUS = "the step is full"
"""Why a group that was answered is answered again by the next step."""


@dataclass(eq=False)
class SynchronousScheduler(Scheduler[GenerationInterface]):
    """Asks for groups when the open step waits for them; see `Scheduler`.

    groups_per_round: asked for at a time. Where dynamic sampling leaves some out, a further round is as large as the
    first: ranks decode many groups in the time of a few. Those that the step then has no place for are answered again
    by the next.
    """

    groups_per_round: int = field(kw_only=True)

    def offload(self) -> None:
        """See `interfaces.GenerationInterface.offload`."""
        self.engine.offload()

    def _wait_for_ready(self, groups: int) -> None:
        """Answer the groups of the step, in rounds where dynamic sampling leaves some out."""
        while not self._are_ready(groups):
            self._draw_ahead()
            tokens: list[Token] = []
            while len(tokens) < self.groups_per_round and self.ledger.may_dispatch():
                tokens.append(self.ledger.dispatch())
            assert tokens, "nothing is admitted, and the step is not full"
            self._pace.rounds += 1
            try:
                # The noise is of the step that drew a prompt: those of two steps are asked for one after the other.
                for _, same_step in groupby(tokens, lambda token: self._drawn[token.position].step):
                    self._answer([*same_step], groups)
            except BaseException as error:
                for token in tokens:
                    self.ledger.requeue(token, type(error).__name__)
                raise

    def _answer(self, tokens: list[Token], groups: int) -> None:
        batches = self.draw.play_now([self._drawn[token.position] for token in tokens])
        for token, batch in zip(tokens, batches, strict=True):
            if self._are_ready(groups):
                self.ledger.requeue(token, SURPLUS)
                self._unused.append((token.position, batch))
            else:
                self._commit(token, batch)

    def _filled(self) -> None:
        """Have the engine sleep: the ranks have its memory from here on."""
        self.engine.offload()
