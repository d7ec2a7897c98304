"""Classes of the user's own, named in a recipe as `package.module:Name`.

A recipe is checked without importing them: `check` reads the path, and only a run imports what it names.
"""

import re
from typing import Annotated, Any

from pydantic import AfterValidator

_NAME = r"[^\W\d]\w*"
_IMPORT_PATH = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}")


def _checked(path: str) -> str:
    if not _IMPORT_PATH.fullmatch(path):
        raise ValueError(
            f"{path!r} is no import path; write package.module:Name, as in my_pkg.losses:MyLossFn"
        )
    return path


ImportPath = Annotated[str, AfterValidator(_checked)]
"""`package.module:Name`, of a class at the top level of a module."""

Arguments = dict[str, Any]
"""Keyword arguments of such a class, as YAML gives them."""
