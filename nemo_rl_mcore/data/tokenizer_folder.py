"""Examine a Hugging Face tokenizer folder: its files can be read, and the model has a row for each id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from nemo_rl_mcore.config.base import Problem, Tree
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.data.hub import (
    CHAR_EOS,
    CHAR_TOKENIZER_NAME,
    CHAR_VOCABULARY,
    end_ids,
    is_hub_id,
    local_folder,
)
from nemo_rl_mcore.data.strict_json import read_json, read_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KEY = "policy.tokenizer.name"
_REMEDY = "name a local Hugging Face tokenizer folder, or set it to char"


def tokenizer_problems(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield what stops `policy.tokenizer.name` from being loaded, or from fitting policy.model.vocab_size."""
    name = policy.tokenizer.name
    folder = local_folder(name)
    if name == "char" or (folder is None and is_hub_id(name)):
        return  # the latter is fetched, see `parts.tokenizer_of`
    if folder is None:
        yield Problem("not-found", KEY, f"no folder {name!r} in {Path.cwd()}", _REMEDY)
    elif not has_tokenizer(name):
        what = f"the folder {name!r} holds no tokenizer (tokenizer.json, tokenizer_config.json)"
        yield Problem("not-found", KEY, what, "name a folder that does, or set it to char")
    else:
        yield from _folder_problems(folder, policy)


def has_tokenizer(name: str) -> bool:
    """Return whether a tokenizer of that name lies on this machine."""
    folder = None if name == "char" else local_folder(name)
    return folder is not None and any(folder.glob("tokenizer*"))


def special_tokens_of(name: str) -> list[str]:
    """Return the special tokens that the JSON of a tokenizer names; the libraries know those of other formats."""
    folder = local_folder(name)
    tokenizer = None if name == "char" or folder is None else _read(folder / "tokenizer.json", _tokenizer, [])
    added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
    return [token.content for token in added.values() if token.special]


def ends_of(policy: PolicyConfig) -> dict[int, str]:
    """Return the ids that end answers, with their texts, as far as files that are here tell.

    The tokenizer's own is the first; then come those of the model's files, and those of the recipe.
    """
    name = policy.tokenizer.name
    more = (*end_ids(policy.model_name, name), *(policy.generation.stop_token_ids or ()))
    if name == CHAR_TOKENIZER_NAME:
        texts = dict(enumerate(CHAR_VOCABULARY))
        return {token: texts.get(token, "") for token in (CHAR_VOCABULARY.index(CHAR_EOS), *more)}
    folder = local_folder(name)
    tokenizer = None if folder is None else _read(folder / "tokenizer.json", _tokenizer, [])
    if folder is None or tokenizer is None:
        return dict.fromkeys(more, "")
    own = _text_of((_read(folder / "tokenizer_config.json", _settings, []) or {}).get("eos_token"))
    first = None if own is None else tokenizer.token_to_id(own)
    ids = more if first is None else (first, *more)
    return {token: tokenizer.id_to_token(token) or "" for token in ids}


def _folder_problems(folder: Path, policy: PolicyConfig) -> Iterator[Problem]:
    problems = list[Problem]()
    settings = _read(folder / "tokenizer_config.json", _settings, problems)
    tokenizer = _read(folder / "tokenizer.json", _tokenizer, problems)
    yield from problems
    if tokenizer is None:
        return
    lacking = [text for text in _named_in(settings or {}) if tokenizer.token_to_id(text) is None]
    rows = max(_rows_of(tokenizer), tokenizer.get_vocab_size() + len(lacking))
    if rows > policy.model.vocab_size:
        yield too_large(policy, rows)


def _read[Content](path: Path, read: Callable[[Path], Content], problems: list[Problem]) -> Content | None:
    """Return what a file holds; None for no file, as of older formats, and for one that is a problem."""
    if not path.exists():
        return None
    try:
        return read(path)
    except OSError as error:
        what = f"{str(path)!r} cannot be read: {error.strerror}"
    except ValueError as error:
        what = f"{str(path)!r} is not what a tokenizer is saved as: {error}"
    problems.append(Problem("not-readable", KEY, what, _REMEDY))
    return None


def too_large(policy: PolicyConfig, rows: int, lacking: Sequence[str] = ()) -> Problem:
    """Return that the tokenizer needs more rows of embeddings than the model has; lacking: tokens without one."""
    name, there = policy.tokenizer.name, policy.model.vocab_size
    without = f", none for {', '.join(map(repr, lacking))}" if lacking else ""
    if policy.weights is not None:
        what = (
            f"{name!r} has {rows} ids, and the weights (policy.{policy.weights}) have {there} rows{without}"
        )
        remedy = f"resize the embeddings to {rows} rows, or name the tokenizer of the weights"
        return Problem("contradicts", KEY, what, remedy, (f"policy.{policy.weights}",))
    what = f"{there} is below the {rows} ids of {KEY}: {name!r}{without}"
    return Problem("too-small", "policy.model.vocab_size", what, f"set vocab_size: {rows}", (KEY,))


def _rows_of(tokenizer: Tokenizer) -> int:
    """Return the rows of the embedding that the ids need; ids with gaps need more rows than there are tokens."""
    tokens = tokenizer.get_vocab_size()
    if all(tokenizer.id_to_token(token) is not None for token in range(tokens)):
        return tokens  # the vocabulary itself, a dict of all of them, takes twice as long to get and to free
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def _settings(path: Path) -> Tree:
    settings = read_json(path, finite=False)
    if not isinstance(settings, dict):
        raise ValueError("it should be an object")
    return cast("Tree", settings)


_ONE = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MANY = ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder")


def _named_in(settings: Tree) -> list[str]:
    """Return the tokens that settings name; those that tokenizer.json lacks are added when the tokenizer is loaded.

    Its class may add others still, which only transformers knows: see `parts.open_tokenizer`.
    """
    named = [settings.get(key) for key in _ONE]
    for many in (settings.get(key) for key in _MANY):
        listed = [*cast("Tree", many).values()] if isinstance(many, dict) else many
        named += cast("list[object]", listed) if isinstance(listed, list) else []
    return [*dict.fromkeys(text for text in map(_text_of, named) if text is not None)]


def _text_of(token: object) -> str | None:
    text = cast("Tree", token).get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _tokenizer(path: Path) -> Tokenizer:
    """Read tokenizer.json as the run does; raises OSError, and ValueError with the place."""
    return _parsed(read_regular(path))


@lru_cache(maxsize=1)
def _parsed(content: bytes) -> Tokenizer:
    from tokenizers import Tokenizer  # for folders only: it takes 15 ms, and imports no framework

    try:
        return Tokenizer.from_buffer(content)
    except BaseException as error:
        # Some files have the library panic; what that raises is no Exception, and its class cannot be imported.
        if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(str(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")) from error
