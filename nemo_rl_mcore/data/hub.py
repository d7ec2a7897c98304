"""Folders of Hugging Face's models and tokenizers: found, fetched and examined, without a framework.

`huggingface_hub`, `tokenizers` and `safetensors` are imported where they are used, in 15 ms each.
"""

# huggingface_hub leaves parameters of its functions untyped.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, cast

from nemo_rl_mcore.config.base import ConfigError, Problem, Tree
from nemo_rl_mcore.data.strict_json import read_json, read_regular
from nemo_rl_mcore.errors import RefusedError, quoted, shortened

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from nemo_rl_mcore.config.policy import PolicyConfig

CHAR_TOKENIZER_NAME = "char"
# The position of a character is its id. Letters carry no meaning: a fresh model babbles them.
CHAR_VOCABULARY = "0123456789+=>#^$_abcdefghijklmno"
CHAR_EOS = "$"
GENERATION = "generation_config.json"
EOS = "eos_token_id"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
KEY = "policy.tokenizer.name"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_OF_TOKENIZERS = (
    *("tokenizer*", "*.jinja", "special_tokens_map.json"),
    *("vocab*", "merges.txt", "added_tokens.json"),
)
_OF_MODELS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_UNWANTED = ("consolidated*", "original/*")
"""Copies of the weights in other formats."""
_REMEDY = "name a local Hugging Face tokenizer folder, or set it to char"


def is_hub_id(name: str) -> bool:
    """Return whether a name may be that of a model on the hub: `organisation/model`."""
    return _HUB_ID.fullmatch(name) is not None


def local_folder(name: str) -> Path | None:
    """Return the folder of that path or, for a hub id, the newest snapshot in the local cache; None without one."""
    if (folder := Path(name)).is_dir():
        return folder
    if not is_hub_id(name):
        return None
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    cache = str(Path(os.environ.get("HF_HOME", f"{caches}/huggingface")) / "hub")
    cache = os.environ.get("HF_HUB_CACHE", os.environ.get("HUGGINGFACE_HUB_CACHE", cache))
    cached = Path(cache).expanduser() / f"models--{name.replace('/', '--')}"
    newest = cached / "refs" / "main"
    if not newest.is_file():
        return None
    snapshot = cached / "snapshots" / newest.read_text(encoding="utf-8").strip()
    return snapshot if snapshot.is_dir() else None


def _tokenizer_folder(name: str | None) -> Path | None:
    return None if name in (None, CHAR_TOKENIZER_NAME) else local_folder(name)


def read_object(path: Path, key: str) -> dict[str, object]:
    """Return the object that a JSON file of transformers holds; raises ConfigError with a problem of the key."""
    try:
        config = read_json(path, finite=False)  # transformers writes Infinity
        if not isinstance(config, dict):
            raise ValueError("it does not hold an object")
        return cast("dict[str, object]", config)
    except (OSError, ValueError) as error:
        raise ConfigError([Problem("not-readable", key, f"{str(path)!r} cannot be read: {error}")]) from error


def end_ids(model_name: str | None, tokenizer: str) -> tuple[int, ...]:
    """Return each id of `eos_token_id` in generation_config.json and config.json of these folders or hub ids.

    A checkpoint has the former beside its tokenizer. Files that are not on this machine yet are passed over.
    Raises ConfigError for a value that is no id, and for a file that cannot be read.
    """
    found = list[int]()
    for key, name in (("policy.model_name", model_name), (KEY, tokenizer)):
        folder = _tokenizer_folder(name)
        for file in () if folder is None else (folder / GENERATION, folder / "config.json"):
            given = read_object(file, key).get(EOS) if file.is_file() else None
            for one in cast("list[object]", given if isinstance(given, list) else [given]):
                if isinstance(one, int) and not isinstance(one, bool) and one >= 0:
                    found.append(one)
                elif given is not None:
                    what = f"{str(file)!r}: {EOS} holds {quoted(one)}, which is not a token id"
                    raise ConfigError([Problem("not-readable", key, what, "write one id, or a list of them")])
    return tuple(dict.fromkeys(found))


def fetched_folder(name: str) -> Path:
    """Return a model's folder: the path itself or, for a hub id, its snapshot in the cache, completed if need be.

    Ranks of one machine may call it at the same time: the hub's locks let one of them fetch.
    Raises ValueError when the model is not here and cannot be fetched.
    """
    folder = local_folder(name)
    if folder is not None and (folder == Path(name) or _is_complete(folder)):
        return folder
    what = f"policy.model_name: {name!r} is not complete"
    return _fetched(name, _OF_MODELS, what, "incomplete-model", whole=True)


def fetch_tokenizer(name: str) -> None:
    """Fetch the tokenizer of a hub id into the local cache, if need be; ValueError when it cannot be fetched."""
    folder = local_folder(name)
    if is_hub_id(name) and (folder is None or not any(folder.glob("tokenizer*"))):
        _fetched(name, (*_OF_TOKENIZERS, GENERATION), f"{KEY}: {name!r} is not", "no-tokenizer")


def _fetched(name: str, wanted: tuple[str, ...], what: str, code: str, *, whole: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=[*wanted], ignore_patterns=[*_UNWANTED]))
        if whole and not _is_complete(folder):  # offline the library is content with an incomplete one
            raise FileNotFoundError("offline, or a model without safetensors files")
        return folder
    except Exception as error:
        # Offline, an unknown name, a gated model, a full disk: the library raises classes of four other libraries.
        reason = f"{type(error).__name__}: {str(error).partition('\n')[0]}"
        remedy = "fetch it where there is a network, or name a local folder"
        lacking = f"{what} in the local Hugging Face cache and cannot be fetched ({reason}); {remedy}"
        raise RefusedError(lacking, code=code) from error


def _is_complete(snapshot: Path) -> bool:
    index = snapshot / INDEX
    weights = {*read_weight_map(index).values()} if index.is_file() else {ONE_FILE}
    return all((snapshot / file).is_file() for file in ("config.json", *weights))


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, which need not exist where an index names it; raises ValueError."""
    if (index := folder / INDEX).is_file():
        return {name: _weight_file(folder, file) for name, file in read_weight_map(index).items()}
    if not (folder / ONE_FILE).is_file():
        what = f"{str(folder)!r} holds neither {ONE_FILE} nor {INDEX}; other formats are not read"
        raise RefusedError(what, code="no-weights")
    path = _weight_file(folder, ONE_FILE)
    return dict.fromkeys(tensors_of(path), path)


def require_whole_weights(folder: Path) -> None:
    """Raise ValueError where a file of the weights is missing or cut, or lacks a tensor that the index finds in it."""
    file_of = tensor_files(folder)
    held = {path: tensors_of(path) for path in dict.fromkeys(file_of.values())}
    for name, path in file_of.items():
        if name not in held[path]:
            what = f"{str(path)!r} does not hold the tensor {shortened(name)}"
            raise RefusedError(what, code="missing-tensors")


def tensors_of(path: Path) -> frozenset[str]:
    """Return the names of a safetensors file's tensors; raises ValueError where it is broken, longer or cut."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            return frozenset(cast("list[str]", file.keys()))  # pyright: ignore[reportUnknownMemberType]
    except (OSError, SafetensorError) as error:
        raise RefusedError(f"{str(path)!r} cannot be read: {error}", code="unreadable-file") from error


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, as an index names it; raises ValueError when it is no index."""
    try:
        content = read_json(index, finite=False)
        found = cast("dict[str, object]", content).get("weight_map") if isinstance(content, dict) else None
        if not isinstance(found, dict):
            raise ValueError("it has no weight_map")
        for name, file in cast("dict[str, object]", found).items():
            if not isinstance(file, str):
                raise ValueError(f"weight_map.{shortened(name)} is not a file name")
        return cast("dict[str, str]", found)
    except (OSError, ValueError) as error:
        what = f"{str(index)!r} is not an index of safetensors files: {error}"
        raise RefusedError(what, code="no-index") from error


def _weight_file(folder: Path, name: str) -> Path:
    """Return the path of a file of weights, which need not exist; raises ValueError when it leads out of the folder.

    A snapshot in the hub's cache (`snapshots/REVISION`) may have links into `blobs` beside it.
    """
    path, inside = folder / name, PurePosixPath(name)
    home, end = folder.resolve(), path.resolve()
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append((home.parent.parent / "blobs").resolve())
    if inside.is_absolute() or ".." in inside.parts or not any(end.is_relative_to(one) for one in homes):
        what = f"{str(path)!r} leads out of the folder, to {str(end)!r}; name the weights' own folder"
        raise RefusedError(what, code="outside-folder")
    if end.exists() and not end.is_file():
        raise RefusedError(f"{str(path)!r} cannot be read: no regular file", code="not-a-regular-file")
    return path


def tokenizer_problems(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield reasons why `policy.tokenizer.name` cannot be loaded, or does not fit policy.model.vocab_size."""
    name = policy.tokenizer.name
    folder = _tokenizer_folder(name)
    if folder is None:
        if name != CHAR_TOKENIZER_NAME and not is_hub_id(name):  # which is fetched as the run starts
            yield Problem("not-found", KEY, f"no folder {name!r} in {Path.cwd()}", _REMEDY)
        return
    if not has_tokenizer(name):
        what = f"the folder {name!r} holds no tokenizer (tokenizer.json, tokenizer_config.json)"
        yield Problem("not-found", KEY, what, "name a folder that does, or set it to char")
        return
    settings, tokenizer, problems = _read_tokenizer(folder)
    yield from problems
    if tokenizer is None:
        return
    # Tokens that settings name and tokenizer.json lacks are added when the tokenizer is loaded. Its class may add
    # others still, which only transformers knows.
    named = [settings.get(f"{kind}_token") for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    for many in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
        listed = settings.get(many)
        listed = [*cast("Tree", listed).values()] if isinstance(listed, dict) else listed
        named += cast("list[object]", listed) if isinstance(listed, list) else []
    texts = {text for token in named if (text := _text_of(token)) is not None}
    lacking = [text for text in texts if tokenizer.token_to_id(text) is None]
    tokens = rows = tokenizer.get_vocab_size()
    # Ids with gaps need more rows than there are tokens; the vocabulary itself, a dict, takes twice as long to get.
    if any(tokenizer.id_to_token(token) is None for token in range(tokens)):
        rows = 1 + max(tokenizer.get_vocab().values(), default=-1)
    if (rows := max(rows, tokens + len(lacking))) > policy.model.vocab_size:
        yield too_large(policy, rows)


def has_tokenizer(name: str) -> bool:
    folder = _tokenizer_folder(name)
    return folder is not None and any(folder.glob("tokenizer*"))


def special_tokens_of(name: str) -> list[str]:
    """Return the special tokens in a tokenizer's JSON; the libraries know those of other formats."""
    folder = _tokenizer_folder(name)
    tokenizer = None if folder is None else _read_tokenizer(folder)[1]
    added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
    return [token.content for token in added.values() if token.special]


def ends_of(policy: PolicyConfig) -> dict[int, str]:
    """Return the ids that end answers, with their texts, as far as the files are here.

    The tokenizer's own is the first; then come those of the model's files, and those of the recipe.
    """
    name = policy.tokenizer.name
    more = (*end_ids(policy.model_name, name), *(policy.generation.stop_token_ids or ()))
    if name == CHAR_TOKENIZER_NAME:
        texts = dict(enumerate(CHAR_VOCABULARY))
        return {token: texts.get(token, "") for token in (CHAR_VOCABULARY.index(CHAR_EOS), *more)}
    folder = local_folder(name)
    settings, tokenizer, _ = ({}, None, []) if folder is None else _read_tokenizer(folder)
    if tokenizer is None:
        return dict.fromkeys(more, "")
    own = _text_of(settings.get("eos_token"))
    first = None if own is None else tokenizer.token_to_id(own)
    ids = more if first is None else (first, *more)
    return {token: tokenizer.id_to_token(token) or "" for token in ids}


def _read_tokenizer(folder: Path) -> tuple[Tree, Tokenizer | None, list[Problem]]:
    settings, tokenizer, problems = Tree(), None, list[Problem]()
    for path in (folder / "tokenizer_config.json", folder / "tokenizer.json"):
        try:
            if not path.exists():  # as of older formats
                continue
            if path.name == "tokenizer.json":
                tokenizer = _parsed(read_regular(path))
                continue
            if not isinstance(found := read_json(path, finite=False), dict):
                raise ValueError("it should be an object")
            settings = cast("Tree", found)
        except (OSError, ValueError) as error:
            wrong = f"is not what a tokenizer is saved as: {error}"
            wrong = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else wrong
            problems.append(Problem("not-readable", KEY, f"{str(path)!r} {wrong}", _REMEDY))
    return settings, tokenizer, problems


def too_large(policy: PolicyConfig, rows: int, lacking: Sequence[str] = ()) -> Problem:
    """Return the problem of a tokenizer that needs more embeddings than the model has; lacking: tokens without one."""
    name, there = policy.tokenizer.name, policy.model.vocab_size
    without = f", none for {', '.join(map(repr, lacking))}" if lacking else ""
    if policy.weights is not None:
        weights = f"policy.{policy.weights}"
        what = f"{name!r} has {rows} ids, and the weights ({weights}) have {there} rows{without}"
        remedy = f"resize the embeddings to {rows} rows, or name the tokenizer of the weights"
        return Problem("contradicts", KEY, what, remedy, (weights,))
    what = f"{there} is below the {rows} ids of {KEY}: {name!r}{without}"
    return Problem("too-small", "policy.model.vocab_size", what, f"set vocab_size: {rows}", (KEY,))


def _text_of(token: object) -> str | None:
    text = cast("Tree", token).get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


@lru_cache(maxsize=1)
def _parsed(content: bytes) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(content)
    except BaseException as error:
        # Some files make the library panic; that error is no Exception, and its class cannot be imported.
        if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(str(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")) from error
