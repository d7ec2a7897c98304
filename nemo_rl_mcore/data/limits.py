"""Rows as prompts in the form that the model sees, without those that have too many tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.data.answers import answer_row
from nemo_rl_mcore.data.chat import with_template
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.examples import Example
from nemo_rl_mcore.data.literal_text import literal_spans
from nemo_rl_mcore.data.preference import given_pair, pair_rows
from nemo_rl_mcore.data.special_tokens import KEY, REMEDY, first_token
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.errors import RefusedError, code_of

_CHARACTERS = 256
"""More than a token of any vocabulary stands for in running text: what has more is not encoded to be counted."""


@dataclass(frozen=True)
class Limits:
    """The limits of a run's rows; `kind` is that of other rows than those that are trained on."""

    config: RunConfig
    tokenizer: Tokenizer
    kind: RowKind | None = None

    def fitting(self, examples: Iterable[Example], *, sampled: bool) -> Iterator[Prompt]:
        """Yield the rows that fit; `sampled` says that the policy answers their prompts.

        Raises ValueError for a row that cannot be encoded and, unless `data.overlong` is drop, for one too long.
        """
        for example in examples:
            try:
                prompt = self._prompt(example)
                excess = self.excess(prompt, sampled=sampled)
            except ValueError as error:
                raise RefusedError(f"{example.place}: {error}", code=code_of(error)) from error
            if excess is None:
                yield prompt
            elif self.config.data.overlong == "error":
                raise RefusedError(
                    f"{example.place}: {excess}, shorten the row, or set data.overlong: drop",
                    code="row-length",
                )

    def _prompt(self, example: Example) -> Prompt:
        text, context = (example.context, ()) if isinstance(example.context, str) else ("", example.context)
        prompt = Prompt(
            example.index,
            text,
            example.answer,
            example.rejected,
            context,
            example.imitate_all,
            example.solution,
            example.source,
            example.place,
            example.columns,
            extras=example.extras,
        )
        return self.rendered(prompt, example.frame)

    def rendered(self, prompt: Prompt, frame: tuple[int, int] = (0, 0)) -> Prompt:
        """Return the prompt in the chat template, where one is asked for, with the places of what is not to be parsed.

        frame: of a plain text, see `Message.frame`. Raises ValueError where the recipe does not say what a special
        token of a row is.
        """
        data, tokens = self.config.data, self.tokenizer.special_tokens
        if data.special_tokens_in_content is None and (
            token := first_token(prompt, frame, tokens, self._kind)
        ):
            raise RefusedError(
                f"it holds the special token {token!r}; {REMEDY.format(KEY)}", code="special-token"
            )
        if data.apply_chat_template:
            return with_template(prompt, self.tokenizer, frame)
        literal, opening = literal_spans(prompt.text, tokens, frame), self.tokenizer.opening
        if prompt.text.startswith(opening) and not (literal and literal[0][0] == 0):
            return replace(prompt, literal=literal)
        shifted = tuple((start + len(opening), end + len(opening)) for start, end in literal)
        return replace(prompt, text=opening + prompt.text, literal=shifted)

    @property
    def _kind(self) -> RowKind:
        return self.kind or self.config.row_kind

    def excess(self, prompt: Prompt, *, sampled: bool) -> str | None:
        """Return what is too long, and the key to raise; None where the row fits."""
        longest_prompt, longest = self.config.max_prompt_length, self.config.policy.max_total_sequence_length
        if sampled and (excess := _too_many(len(prompt.text), longest_prompt)):
            return f"the prompt {excess}: raise data.max_input_seq_length"
        if sampled and (length := len(self.tokenizer.encode(prompt.text, prompt.literal))) > longest_prompt:
            return (
                f"the prompt has {length} tokens, and {longest_prompt} are allowed: raise data.max_input_seq_length, "
                "or policy.max_total_sequence_length where it is null"
            )
        kind = self._kind
        if kind is RowKind.PROMPTS:
            return None
        texts = [prompt.text or "", *(turn.content for turn in prompt.context), prompt.imitated]
        if excess := _too_many(max(map(len, [*texts, prompt.rejected or ""])), longest):
            return f"the row {excess}: raise policy.max_total_sequence_length"
        if kind is RowKind.PAIRS:
            rows = pair_rows(given_pair(prompt), self.tokenizer)
        else:
            rows = (answer_row(prompt, self.tokenizer),)
        length = max(len(row.ids) for row in rows)
        if length > longest:
            return f"the row has {length} tokens: raise policy.max_total_sequence_length: {longest}"
        return None


def _too_many(characters: int, tokens: int) -> str | None:
    if characters <= _CHARACTERS * tokens:
        return None
    return f"has {characters} characters, more than the {tokens} tokens that are allowed can be"
