"""What the JSON of a Hugging Face tokenizer folder tells without the libraries that load it."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from pydantic import BaseModel, ValidationError

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.hf.hub import is_hub_id, local_folder
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.strict_json import read_json

KEY = "policy.tokenizer.name"
_REMEDY = "name a local Hugging Face tokenizer folder, or set it to char"


class _File(BaseModel):
    """A file of the folder that holds an object; other keys than those of the class may hold anything."""

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding that the ids in the file need."""
        return 0


class _Token(BaseModel):
    content: str
    special: bool = False


class _TokenModel(BaseModel):
    # Ids by text; in a Unigram model, texts in the order of ids with their scores.
    vocab: dict[str, int] | list[tuple[str, float]]


class _TokenizerFile(_File):
    """The part of tokenizer.json without which the libraries refuse it."""

    added_tokens: list[_Token]
    model: _TokenModel

    @property
    def vocabulary(self) -> int:
        """See `_File`; ids with gaps need more rows than there are tokens."""
        vocab = self.model.vocab
        texts = {*vocab} if isinstance(vocab, dict) else {text for text, _ in vocab}
        tokens = len(texts | {token.content for token in self.added_tokens})
        return max(tokens, 1 + max(vocab.values(), default=-1)) if isinstance(vocab, dict) else tokens


_FILES = {"tokenizer.json": _TokenizerFile, "tokenizer_config.json": _File}
"""Older formats, such as tokenizer.model, are left to the libraries."""


def tokenizer_problems(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield what stops `policy.tokenizer.name` from being loaded, or from fitting policy.model.vocab_size."""
    name = policy.tokenizer.name
    folder = local_folder(name)
    if name == "char" or (folder is None and name == policy.model_name and is_hub_id(name)):
        return  # the latter is fetched with the weights
    if folder is None:
        yield Problem("not-found", KEY, f"no folder {name!r} in {Path.cwd()}", _REMEDY)
    elif not any(folder.glob("tokenizer*")):
        what = f"the folder {name!r} holds no tokenizer (tokenizer.json, tokenizer_config.json)"
        yield Problem("not-found", KEY, what, "name a folder that does, or set it to char")
    else:
        for file, kind in _FILES.items():
            if (folder / file).exists():
                yield from _file_problems(folder / file, kind, policy)


def special_tokens_of(name: str) -> list[str]:
    """The special tokens that the JSON of a tokenizer names; the libraries know those of other formats."""
    folder = local_folder(name)
    path = None if name == "char" or folder is None else folder / "tokenizer.json"
    if path is None or not path.exists():
        return []
    try:
        file = _TokenizerFile.model_validate(_object(path))
    except (OSError, ValueError):
        return []  # it is a problem, see `tokenizer_problems`, or fetched later
    return [token.content for token in file.added_tokens if token.special]


def _file_problems(path: Path, kind: type[_File], policy: PolicyConfig) -> Iterator[Problem]:
    try:
        vocabulary = kind.model_validate(_object(path)).vocabulary
    except OSError as error:
        yield Problem("not-readable", KEY, f"{str(path)!r} cannot be read: {error.strerror}", _REMEDY)
    except ValidationError as error:
        yield Problem(
            "not-readable",
            KEY,
            f"{str(path)!r} is not what a tokenizer is saved as: {_first(error)}",
            _REMEDY,
        )
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


def _object(path: Path) -> object:
    try:
        value = read_json(path, finite=False)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("it should be an object")
    return cast("object", value)


def _first(error: ValidationError) -> str:
    details = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in details["loc"])
    return f"{place}: {details['msg']}" if place else details["msg"]
