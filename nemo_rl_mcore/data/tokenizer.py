"""Text to token ids and back: the embedded character tokenizer, or a local Hugging Face folder.

`tokenizers` and `transformers` are imported only when a tokenizer is loaded.
"""

# transformers leaves parameters of its tokenizer classes untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import cache, cached_property
from inspect import signature
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data.hub import (
    CHAR_EOS,
    CHAR_TOKENIZER_NAME,
    CHAR_VOCABULARY,
    EOS,
    GENERATION,
    KEY,
    local_folder,
)
from nemo_rl_mcore.data.messages import MASK, Message, Spans, Tools, pattern_of
from nemo_rl_mcore.errors import RefusedError, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAR_PAD = "_"
_SHOWN = 8
_LEFT_OUT, _RUN = " \n\0\u0301\ue000", 16
"""Characters that some tokenizers drop or have no token for, and a trial run's length, in longest tokens."""


_MARK_ENDS = "\ue001"
_BREAK = f"{MASK}-{_MARK_ENDS}"
_MARKS = re.compile(f"{MASK}(?:[0-9]+|-){_MARK_ENDS}")


type Tokenizer = CharTokenizer | HuggingFaceTokenizer
"""vocab_size: all ids, special tokens included. ends: ids that end a response and are not part of its text, the
tokenizer's own eos_token_id first. opening: the begin of sequence that is added to prompts without one, or empty.
answers: the tokens to train on in given answers. special_tokens: texts that stay text in content; empty if content is
parsed for special tokens.
"""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template's Jinja text, None for the tokenizer's own, and its variables.

    add_bos, add_eos, imitated: as in `DataConfig`.
    """

    text: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    add_bos: bool = False
    add_eos: bool = False
    imitated: str = "answer"


def load_tokenizer(
    name: str,
    *,
    parse_content: bool = False,
    template: ChatTemplate | None = None,
    ends: Sequence[int] = (),
    stops: Sequence[int] = (),
) -> Tokenizer:
    """Load the tokenizer `policy.tokenizer.name`: `char`, or a local Hugging Face folder.

    parse_content: read special tokens in rows and environments as control tokens. ends: the model's end ids. stops:
    further ids that end a response; if they are ordinary tokens, their text belongs to it.
    """
    if name == CHAR_TOKENIZER_NAME:
        return CharTokenizer(ends)
    return HuggingFaceTokenizer(name, parse_content=parse_content, template=template, ends=ends, stops=stops)


class _Answering(Protocol):
    pad_token_id: int
    ends: tuple[int, ...]

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of all ids, including special tokens and padding."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text before the first of the `ends`, without padding on the right."""
        kept = [*takewhile(lambda token: token not in self.ends, ids)]
        while kept and kept[-1] == self.pad_token_id:
            kept.pop()
        return self.text_of(kept)

    def _save(self, folder: Path, saved: PreTrainedTokenizerBase) -> None:
        """Write a tokenizer's files for transformers and vLLM, with its ends in generation_config.json."""
        saved.save_pretrained(folder)
        if len(self.ends) > 1:
            text = json.dumps({EOS: self.ends}, indent=2)
            (folder / GENERATION).write_text(f"{text}\n", encoding="utf-8")


class CharTokenizer(_Answering):
    """One token for each of 32 characters; texts may not contain the two that mean end and padding."""

    special_tokens: Sequence[str] = ()
    opening = ""
    answers = ChatTemplate()

    def __init__(self, ends: Sequence[int] = ()) -> None:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        vocabulary = {character: index for index, character in enumerate(CHAR_VOCABULARY)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
        tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
        self._tokenizer = tokenizer
        self._ordinary = frozenset(CHAR_VOCABULARY) - {CHAR_EOS, CHAR_PAD}
        self.vocab_size = len(CHAR_VOCABULARY)
        self.pad_token_id, self.eos_token_id = vocabulary[CHAR_PAD], vocabulary[CHAR_EOS]
        self.ends = tuple(dict.fromkeys((self.eos_token_id, *ends)))

    def encode(self, text: str, literal: Spans = ()) -> list[int]:
        """Return one id per character; raises ValueError that lists unknown characters."""
        if foreign := sorted(set(text) - self._ordinary):
            known = "".join(sorted(self._ordinary))
            what = f"the character tokenizer cannot encode {foreign[:_SHOWN]} of {text!r:.80}; it knows {known!r}"
            raise RefusedError(what, code="unknown-characters")
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def fewest_tokens(self, characters: int) -> int:
        return characters

    def text_of(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def render_chat(self, messages: Sequence[Message], **_: object) -> str:
        what = "data.apply_chat_template: the character tokenizer has no chat template"
        raise RefusedError(what, code="no-chat-template")

    def with_variables(self, variables: Mapping[str, Any]) -> CharTokenizer:
        return self  # there is no template

    def save_as_hugging_face(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        ends = {"eos_token": CHAR_EOS, "pad_token": CHAR_PAD}
        options = {"tokenizer_object": self._tokenizer, "clean_up_tokenization_spaces": False}
        self._save(folder, PreTrainedTokenizerFast(**ends, **options))


class HuggingFaceTokenizer(_Answering):
    """A tokenizer folder as written by `save_pretrained`; nothing is fetched, and its code never runs."""

    def __init__(
        self,
        directory: str,
        *,
        parse_content: bool = False,
        template: ChatTemplate | None = None,
        ends: Sequence[int] = (),
        stops: Sequence[int] = (),
    ) -> None:
        folder, own, template = local_folder(directory), f"{KEY}: {directory!r}", template or ChatTemplate()
        if folder is None:
            remedy = f"give {CHAR_TOKENIZER_NAME!r}, a local Hugging Face tokenizer, or a cached model's id"
            raise RefusedError(f"{own} is not a directory; {remedy}", code="no-tokenizer")
        from transformers import AutoTokenizer

        try:
            loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            # `tokenizers` raises plain Exception for unreadable files, and transformers whatever a missing key or wrong
            # type leads to.
            what = f"cannot load a tokenizer from {directory!r}: {type(error).__name__}: {error}"
            raise RefusedError(f"{KEY}: {what}", code="unreadable-tokenizer") from error
        self._tokenizer = cast("PreTrainedTokenizerBase", loaded)
        self._template = own if template.text is None else "policy.tokenizer.chat_template"
        self._variables, self.answers = template.variables, template
        if template.text is not None:
            self._tokenizer.chat_template = template.text
        bos = self._tokenizer.bos_token if template.add_bos else None
        self.opening = bos if isinstance(bos, str) else ""
        added = self._tokenizer.added_tokens_decoder
        self._added = {token.content: token for token in added.values() if token.special}
        special = tuple(dict.fromkeys((*self._added, *map(str, self._tokenizer.all_special_tokens))))
        known: dict[str, int] = self._tokenizer.get_vocab()
        self._ids = {token: known[token] for token in special if token in known}
        self._marks = {token: f"{MASK}{number}{_MARK_ENDS}" for token, number in self._ids.items()}
        self.special_tokens: Sequence[str] = () if parse_content else special
        eos_token_id, pad_token_id = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id
        if not isinstance(eos_token_id, int):
            what = f"{own} has no end-of-sequence token; set eos_token in its tokenizer_config.json"
            raise RefusedError(what, code="no-end-token")
        self.vocab_size, self.eos_token_id = len(self._tokenizer), eos_token_id
        controls = [stop for stop in stops if stop in added and added[stop].special]
        self.ends = tuple(dict.fromkeys((eos_token_id, *ends, *controls)))
        self.pad_token_id = pad_token_id if isinstance(pad_token_id, int) else eos_token_id
        self._longest_token: int | None = None
        """The longest token's characters, computed on demand; 0 if a long text may be a few tokens."""

    def encode(self, text: str, literal: Spans = ()) -> list[int]:
        """Encode a text without adding special tokens; those at `literal` are encoded as text.

        For these a copy of the tokenizer splits every special token as text (`split_special_tokens`), and marks stand
        for those meant as control tokens. Raises ValueError for a special token that has no ids but its control id.
        """
        if not literal:
            return self._tokenizer.encode(text, add_special_tokens=False)
        if _MARKS.search(text):
            raise ValueError("the tokenizer cannot encode a text that holds a mark of special tokens")
        real, place, around = pattern_of(tuple(self._ids)), 0, list[str]()
        for start, end in (*literal, (len(text), len(text))):
            around.append(real.sub(lambda found: self._marks[found[0]], text[place:start]))
            place = end
        spelt = [*(text[slice(*span)] for span in literal), ""]
        copied, meant = self._copy
        control = {self._ids[token] for token in self._ids if token != self._tokenizer.unk_token}
        # A vocabulary may hold the special token as a word, too: then a break in it forces its parts.
        for parted in (spelt, [f"{token[:1]}{_BREAK}{token[1:]}" if token else "" for token in spelt]):
            marked = "".join(map("".join, zip(around, parted, strict=True)))
            ids = copied.encode(marked, add_special_tokens=False, split_special_tokens=True)
            found = sum(token in meant for token in ids)
            if control.isdisjoint(ids) and found == len(_MARKS.findall(marked)):
                return [token for one in ids if (token := meant.get(one, one)) is not None]
        raise ValueError(f"the tokenizer cannot encode the special token {spelt[0]!r} as text")

    @cached_property
    def _copy(self) -> tuple[PreTrainedTokenizerBase, dict[int, int | None]]:
        """Return a copy with the marks as added tokens, and the control id for which each mark stands."""
        from tokenizers import AddedToken

        marks = [AddedToken(_BREAK, normalized=False, special=False)]
        for name, mark in self._marks.items():
            added = self._added.get(name)
            strips = {"lstrip": bool(added and added.lstrip), "rstrip": bool(added and added.rstrip)}
            marks.append(AddedToken(mark, normalized=False, special=False, **strips))
        copied: Any = deepcopy(self._tokenizer)
        copied.add_tokens(marks)
        known: dict[str, int] = copied.get_vocab()
        meant = {known[mark]: self._ids[name] for name, mark in self._marks.items()}
        return copied, {known[_BREAK]: None, **meant}

    def fewest_tokens(self, characters: int) -> int:
        """Return a lower bound on the tokens in a text with this many characters."""
        if self._longest_token is None:
            # Some tokenizers drop spaces, or have one token for a run of unknown characters.
            longest = max(map(len, self._tokenizer.get_vocab()))
            runs = [character * (_RUN * longest) for character in _LEFT_OUT]
            self._longest_token = longest if all(len(self.encode(run)) >= _RUN for run in runs) else 0
        return -(-characters // self._longest_token) if self._longest_token else 0

    def text_of(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode([*ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Tools = (),
        goes_on: bool = False,
    ) -> str:
        """Render a conversation with the chat template; raises ValueError without one, and for messages it refuses.

        tools: functions in OpenAI's form. goes_on: leave the last message open, for an answer to continue.
        """
        if self._tokenizer.chat_template is None:
            what = "data.apply_chat_template: the tokenizer has no chat template"
            raise RefusedError(what, code="no-chat-template")
        try:
            text = self._tokenizer.apply_chat_template(
                [message.fields(parsed=True) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=goes_on,
                **self._variables,
            )
        except Exception as error:  # a template is a program, and may raise anything
            reason = f"{type(error).__name__}: {shortened(str(error), 200)}"
            what = f"{self._template}: the chat template refuses a conversation: {reason}"
            raise RefusedError(what, code="refused-messages") from error
        assert isinstance(text, str)
        return text if text.startswith(self.opening) else self.opening + text

    def with_variables(self, variables: Mapping[str, Any]) -> HuggingFaceTokenizer:
        """Return a copy with further chat-template variables; raises ValueError for names of arguments."""
        others = signature(cast("Any", self._tokenizer.apply_chat_template)).parameters
        if wrong := [name for name in variables if name in others]:
            what = f"not variables of a chat template: {', '.join(wrong)}"
            raise RefusedError(what, code="not-a-variable")
        changed = copy(self)
        changed._variables = {**self._variables, **variables}
        return changed

    def save_as_hugging_face(self, folder: Path) -> None:
        self._save(folder, self._tokenizer)


_NO_CHARACTER = "\ufffd"
_BYTES = 4
"""A character's bytes at most, and so the tokens that may share one."""


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each id; joined, they are `tokenizer.text_of(ids)`.

    Where several tokens share a character, the last one gets it and the others get "".
    """
    whole, end = tokenizer.text_of(ids), 0
    alone = {token: tokenizer.text_of([token]) for token in set(ids)}
    ends: list[int] = []
    before = first = 0
    """Starts of the last group of tokens with a text, and of the group that still waits for one."""
    for last, token in enumerate(ids, start=1):
        text = alone[token]
        if first + 1 < last or not _is_next(text, whole, end):
            # Some decoders drop the space before the first token they see: decode the previous group, too.
            known = len(tokenizer.text_of(ids[before:first]))
            text = tokenizer.text_of(ids[before:last])[known:]
        if _is_next(text, whole, end) or last - first == _BYTES:
            end = min(end + len(text), len(whole))
            before, first = first, last
        ends.append(end)
    return [whole[start:stop] for start, stop in pairwise([0, *ends[:-1], len(whole)])] if ids else []


def _is_next(text: str, whole: str, start: int) -> bool:
    """Return true if the text continues `whole` at `start` and does not end inside a character."""
    return bool(text) and not text.endswith(_NO_CHARACTER) and whole.startswith(text, start)


_tokenizer = cache(load_tokenizer)


@dataclass(frozen=True)
class StopConditions:
    """Ids and texts that end a response and belong to it; texts need the tokenizer."""

    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None

    @classmethod
    def of(cls, policy: PolicyConfig, ids: Iterable[int], more: Sequence[str] = ()) -> Self:
        """Raise ValueError for a tokenizer that is needed and cannot be loaded; more: texts besides the recipe's."""
        strings = (*(policy.generation.stop_strings or ()), *more)
        return cls(frozenset(ids), strings, _tokenizer(policy.tokenizer.name) if strings else None)

    def met_by(self, tokens: Sequence[int]) -> bool:
        """Return true if the response ends with its last token."""
        if tokens[-1] in self.ids:
            return True
        if self.tokenizer is None:
            return False
        # A token has at least a byte, so that n bytes lie within n tokens; one more, as a decoder may drop the first
        # token's leading space.
        longest = max(len(string.encode()) for string in self.strings) + 1
        text = self.tokenizer.text_of(tokens[-longest:])
        return any(string in text for string in self.strings)
