"""The tokens that end an answer, as the files of a model and of its tokenizer name them."""

from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.data.hub_cache import local_folder, read_object
from nemo_rl_mcore.errors import quoted

CHAR_TOKENIZER_NAME = "char"
# The position of a character is its id. Letters carry no meaning: they are what a fresh model babbles.
CHAR_VOCABULARY = "0123456789+=>#^$_abcdefghijklmno"
CHAR_EOS = "$"
GENERATION = "generation_config.json"
EOS = "eos_token_id"


def end_ids(model_name: str | None, tokenizer: str) -> tuple[int, ...]:
    """Return each id of `eos_token_id` in generation_config.json and config.json of these folders or hub ids.

    A checkpoint has the former beside its tokenizer. What is not on this machine yet says nothing.
    Raises ConfigError for what is no id, and for a file that cannot be read.
    """
    found: list[int] = []
    for key, name in (("policy.model_name", model_name), ("policy.tokenizer.name", tokenizer)):
        folder = None if name in (None, CHAR_TOKENIZER_NAME) else local_folder(name)
        for file in () if folder is None else (folder / GENERATION, folder / "config.json"):
            found += _ids_of(file, key) if file.is_file() else []
    return tuple(dict.fromkeys(found))


def _ids_of(file: Path, key: str) -> list[int]:
    given = read_object(file, key).get(EOS)
    ids = [] if given is None else cast("list[object]", given if isinstance(given, list) else [given])
    for one in ids:
        if not isinstance(one, int) or isinstance(one, bool) or one < 0:
            what = f"{str(file)!r}: {EOS} holds {quoted(one)}, which is no id of a token"
            raise ConfigError([Problem("not-readable", key, what, "write one id, or a list of them")])
    return cast("list[int]", ids)
