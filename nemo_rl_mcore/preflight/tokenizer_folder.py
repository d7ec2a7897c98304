"""Examine a Hugging Face tokenizer folder: its files can be read, and the model has a row for each id."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.hf.hub import is_hub_id, local_folder
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.strict_json import read_json, read_regular

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
    elif not any(folder.glob("tokenizer*")):
        what = f"the folder {name!r} holds no tokenizer (tokenizer.json, tokenizer_config.json)"
        yield Problem("not-found", KEY, what, "name a folder that does, or set it to char")
    else:
        for file, rows_of in _FILES.items():
            if (folder / file).exists():
                yield from _file_problems(folder / file, rows_of, policy)


def special_tokens_of(name: str) -> list[str]:
    """Return the special tokens that the JSON of a tokenizer names; the libraries know those of other formats."""
    folder = local_folder(name)
    path = None if name == "char" or folder is None else folder / "tokenizer.json"
    if path is None or not path.exists():
        return []
    try:
        added = _tokenizer(path).get_added_tokens_decoder()
    except (OSError, ValueError):
        return []  # it is a problem, see `tokenizer_problems`, or fetched later
    return [token.content for token in added.values() if token.special]


def _file_problems(path: Path, rows_of: Callable[[Path], int], policy: PolicyConfig) -> Iterator[Problem]:
    try:
        vocabulary = rows_of(path)
    except OSError as error:
        yield Problem("not-readable", KEY, f"{str(path)!r} cannot be read: {error.strerror}", _REMEDY)
    except ValueError as error:
        yield Problem(
            "not-readable", KEY, f"{str(path)!r} is not what a tokenizer is saved as: {error}", _REMEDY
        )
    else:
        if vocabulary > policy.model.vocab_size:
            yield _too_large(str(path.parent), vocabulary, policy)


def _too_large(folder: str, vocabulary: int, policy: PolicyConfig) -> Problem:
    rows = policy.model.vocab_size
    if policy.weights is not None:
        what = f"{folder!r} has {vocabulary} ids, and the weights (policy.{policy.weights}) have {rows}"
        return Problem(
            "contradicts", KEY, what, "name the tokenizer of the weights", (f"policy.{policy.weights}",)
        )
    return Problem(
        "too-small",
        "policy.model.vocab_size",
        f"{rows} is below the {vocabulary} ids of {KEY}: {folder!r}",
        f"set vocab_size: {vocabulary}",
        (KEY,),
    )


def _rows_of_tokens(path: Path) -> int:
    """Return the rows of the embedding that the ids need; ids with gaps need more rows than there are tokens."""
    tokenizer = _tokenizer(path)
    tokens = tokenizer.get_vocab_size()
    if all(tokenizer.id_to_token(token) is not None for token in range(tokens)):
        return tokens  # the vocabulary itself, a dict of all of them, takes twice as long to get and to free
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def _rows_of_settings(path: Path) -> int:
    """Return 0: settings need no rows, but they are to be an object."""
    if not isinstance(read_json(path, finite=False), dict):
        raise ValueError("it should be an object")
    return 0


_FILES = {"tokenizer.json": _rows_of_tokens, "tokenizer_config.json": _rows_of_settings}
"""Older formats, such as tokenizer.model, are left to the libraries."""


def _tokenizer(path: Path) -> Tokenizer:
    """Read tokenizer.json as the run does; raises OSError, and ValueError with the place."""
    from tokenizers import Tokenizer  # for folders only: it takes 15 ms, and imports no framework

    content = read_regular(path)
    try:
        return Tokenizer.from_buffer(content)
    except BaseException as error:
        # Some files have the library panic; what that raises is no Exception, and its class cannot be imported.
        if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(str(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")) from error
