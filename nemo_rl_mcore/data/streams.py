"""Prompts of a source that is read as it is needed: shuffled within a buffer, or not, and never counted."""

# datasets leaves most of its types open.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import batched, count, islice
from typing import cast

from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.data.datasets import Prompt, PromptSource
from nemo_rl_mcore.data.examples import Example, example_of, read_held_out
from nemo_rl_mcore.data.library_rows import open_stream
from nemo_rl_mcore.data.limits import Limits
from nemo_rl_mcore.data.prompt_texts import read_texts
from nemo_rl_mcore.data.row import Row, SourceError
from nemo_rl_mcore.data.row_counts import held_out_problems
from nemo_rl_mcore.data.row_readers import RowError, RowReader
from nemo_rl_mcore.errors import RefusedError

BUFFER = 10_000
"""Rows that the next one is drawn from."""
_PLACE = "__place__"
"""The column that keeps a row's place in the stream through the shuffle."""


def open_streamed(limits: Limits) -> StreamSource:
    """Return the prompts of a run whose rows are streamed; raises ConfigError."""
    config = limits.config
    shares, problems = read_held_out(
        config.validation_sources, config.row_kind, chat=config.data.apply_chat_template
    )
    if problems:
        raise ConfigError(problems)
    held_out = [*limits.fitting(shares, sampled=config.loop.validates)]
    if problems := [*held_out_problems(config, held_out)]:
        raise ConfigError(problems)
    ((path, source),) = config.train_sources.items()
    stream = StreamSource(limits, path, source, held_out)
    stream.train_batch(
        1, config.prompts_per_step
    )  # what is wrong with the source is told before the ranks start
    return stream


@dataclass
class StreamSource(PromptSource):
    """A `PromptSource` over a stream: a step takes the next rows, and a resumed run passes over those before.

    At its end the stream starts over, shuffled in another order; rows that fill no step are left over, so that none
    holds a row twice. What has been read is not kept: a step before the last one is read again from the start.
    """

    limits: Limits
    path: str
    source: SourceConfig
    held_out: Sequence[Prompt]
    _steps: Iterator[Sequence[Example | Prompt]] = field(init=False, repr=False)
    _next: int = field(default=1, init=False)
    _last: list[Prompt] = field(default_factory=list[Prompt], init=False, repr=False)

    def __post_init__(self) -> None:
        self._steps = self._batches()

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        """See `PromptSource.train_batch`; ConfigError for rows that do not serve."""
        if step + 1 != self._next or not self._last:
            if step < self._next:
                self._steps, self._next = self._batches(), 1
            batch = next(islice(self._steps, step - self._next, None))
            self._next = step + 1
            self._last = [*self._prompts(batch)]
        if count > len(self._last):
            raise RefusedError(
                f"{count} rows of a step are more than the {len(self._last)} that a stream gives it",
                code="too-few-rows",
            )
        return self._last[:count]

    def validation(self, count: int | None) -> list[Prompt]:
        """Give the first rows of data.validation, all where they are fewer."""
        return list(self.held_out[:count])

    def _prompts(self, batch: Sequence[Example | Prompt]) -> Iterator[Prompt]:
        yield from (one for one in batch if isinstance(one, Prompt))
        yield from self._fitting(one for one in batch if isinstance(one, Example))

    def _fitting(self, examples: Iterator[Example]) -> Iterator[Prompt]:
        return self.limits.fitting(examples, sampled=self.limits.config.row_kind is RowKind.PROMPTS)

    def _batches(self) -> Iterator[Sequence[Example | Prompt]]:
        """Yield the rows of each step; skipped rows are encoded only where that decides which are left out."""
        config = self.limits.config
        for epoch in count():
            examples, whole = self._examples(epoch), 0
            drops = config.data.overlong == "drop"
            for batch in batched(self._fitting(examples) if drops else examples, config.prompts_per_step):
                if len(batch) == config.prompts_per_step:
                    whole += 1
                    yield batch
            if not whole:
                what = f"a pass over the stream has fewer rows than the {config.prompts_per_step} of a step"
                raise ConfigError(
                    [Problem("too-few-rows", self.path, what, "lower the rows of a step, or add rows")]
                )

    def _examples(self, epoch: int) -> Iterator[Example]:
        config, chat = self.limits.config, self.limits.config.data.apply_chat_template
        texts, wrong = read_texts(self.source)
        if wrong:
            raise ConfigError(problem.below(self.path) for problem in wrong)
        reader = RowReader(self.source, config.row_kind, chat=chat)
        for row, index in self._rows(epoch):
            try:
                read = reader.read(row)
            except RowError as error:
                raise ConfigError(
                    [Problem("wrong-row", f"{self.path}.data_path", f"{row.place}: {error}")]
                ) from error
            if read is None:
                continue
            if read.unscored and config.row_kind is RowKind.PROMPTS:
                raise ConfigError(
                    [Problem("wrong-row", f"{self.path}.answer", f"{row.place}: {read.unscored}")]
                )
            yield example_of(read, texts, row.place, index, "", chat=chat)

    def _rows(self, epoch: int) -> Iterator[tuple[Row, int]]:
        """Yield each row of a pass, with its place in the stream as it lies there."""
        try:
            stream = open_stream(self.source)
        except SourceError as error:
            raise ConfigError([error.problem.below(self.path)]) from error
        seed = self.limits.config.seed + (epoch << 31)
        placed = stream.map(_with_place, with_indices=True)
        if self.limits.config.data.shuffle:
            placed = placed.shuffle(seed=seed, buffer_size=BUFFER)
        for values in _read(cast("Iterable[dict[str, object]]", placed), f"{self.path}.data_path"):
            place = cast("int", values.pop(_PLACE))
            yield Row(f"{self.source.paths[0]}, row {place + 1}", values), place


def _with_place(row: dict[str, object], place: int) -> dict[str, object]:
    return {**row, _PLACE: place}


def _read(rows: Iterable[dict[str, object]], key: str) -> Iterator[dict[str, object]]:
    """Yield the rows; raises ConfigError for unreadable ones, whatever class the format's library raises."""
    rest = iter(rows)
    while True:
        try:
            row = next(rest)
        except StopIteration:
            return
        except Exception as error:
            what = f"a row cannot be read ({type(error).__name__}: {' '.join(str(error).split())})"
            raise ConfigError([Problem("wrong-row", key, what, "mend it")]) from error
        yield row
