"""Strict frozen models, and problems that are collected instead of thrown one by one."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
)

type Code = Literal[
    "already-there",
    "contradicts",
    "disk-full",
    "foreign-recipe",
    "has-no-effect",
    "incompatible",
    "missing",
    "no-signal",
    "not-allowed",
    "not-divisible",
    "not-found",
    "not-installed",
    "not-readable",
    "not-supported",
    "not-writable",
    "one-of",
    "other-model",
    "reference",
    "requires",
    "too-few-rows",
    "too-large",
    "too-small",
    "unknown-key",
    "wrong-kind",
    "wrong-row",
]
"""What kind of mistake it is; docs/configuration.md says what each means. A code stays when the words change."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration: its kind, where, what, and the way out.

    `related` names the other keys the judgement rests on; `where` is "file:line" once the loader knows it.
    """

    code: Code
    path: str
    what: str
    remedy: str = ""
    related: tuple[str, ...] = ()
    where: str = ""

    def __str__(self) -> str:
        head = f"{self.path}: {self.what}" if self.path else self.what
        tail = f"; {self.remedy}" if self.remedy else ""
        return f"{head}{tail}" + (f"  [{self.where}]" if self.where else "")

    @property
    def warns(self) -> bool:
        """Return whether it is a warning, as for a key that nothing reads; all else is an error."""
        return self.code == "has-no-effect"

    def below(self, prefix: str) -> "Problem":
        """Return the same problem seen from the parent section `prefix`."""
        return replace(
            self,
            path=join_path(prefix, self.path),
            related=tuple(join_path(prefix, key) for key in self.related),
        )


def has_no_effect(path: str, value: object, because: str, *related: str) -> Problem:
    """Return the warning of a key that nothing reads, such as one with a switch that is off."""
    return Problem("has-no-effect", path, f"{_as_yaml(value)} has no effect {because}", "remove it", related)


def _as_yaml(value: object) -> str:
    if isinstance(value, BaseModel | dict):
        return "the section"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


class ConfigError(ValueError):
    """Every problem of a configuration at once.

    >>> from nemo_rl_mcore import load_config
    >>> try:
    ...     config = load_config("grpo_copy_cpu.yaml", ["grpo.max_num_steps=0", "seed=-1"])
    ... except ConfigError as error:
    ...     print(sorted(problem.path for problem in error.problems))
    ['grpo.max_num_steps', 'seed']
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self._text())

    def _text(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1))
        return f"{len(self.problems)} problems in the configuration:\n{lines}"


class StrictModel(BaseModel):
    """A frozen section: unknown keys are errors, and nothing is coerced from one type into another.

    Construction checks each field alone. The rules between its own fields are `problems`, which `checked` raises;
    those between sections are in recipe/rules. `recipe.validate` reports all of them for a recipe.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    read_unless: ClassVar[tuple[tuple[str, str, object], ...]] = ()
    """A key, another key of the section, and the value of that with which nothing reads the first."""

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong between fields that are each valid; paths are relative to this section."""
        yield from ()

    def idle(self) -> Iterator[Problem]:
        """Yield a warning for each key that is given and not read."""
        found: set[str] = set()
        for key, switch, off in self.read_unless:
            value, default = getattr(self, key), type(self).model_fields[key].default
            if key not in found and getattr(self, switch) == off and value != default:
                found.add(key)
                yield has_no_effect(key, value, f"with {switch}: {_as_yaml(off)}", switch)


def collect_problems(section: StrictModel, prefix: str = "") -> Iterator[Problem]:
    """Yield what is wrong within a section and within each section inside it, with full paths."""
    for problem in (*section.problems(), *section.idle()):
        yield problem.below(prefix)
    for name in type(section).model_fields:
        yield from _problems_inside(getattr(section, name), join_path(prefix, name))


def checked[Section: StrictModel](kind: type[Section], given: Section | Mapping[str, object]) -> Section:
    """Return a section, or the equal mapping, that meets its own rules; raises ConfigError with every one it breaks.

    Rules between sections are those of a recipe, see `recipe.rules`.
    """
    section = given if isinstance(given, kind) else kind.model_validate(given)
    if found := tuple(problem for problem in collect_problems(section) if not problem.warns):
        raise ConfigError(found)
    return section


def _problems_inside(value: object, path: str) -> Iterator[Problem]:
    if isinstance(value, StrictModel):
        yield from collect_problems(value, path)
    elif isinstance(value, tuple):
        for place, one in enumerate(cast("tuple[object, ...]", value)):
            yield from _problems_inside(one, join_path(path, str(place)))
    elif isinstance(value, dict):
        for key, one in cast("dict[str, object]", value).items():
            yield from _problems_inside(one, join_path(path, str(key)))


Tree = dict[str, object]
"""A recipe, or a section of one, before it is checked."""


def value_at(tree: object, path: str) -> object:
    """Return the value at a path, with places in lists as keys, or null where the path ends early."""
    for key in path.split("."):
        if isinstance(tree, list | tuple):
            many = cast("list[object]", tree)
            tree = many[int(key)] if key.isdecimal() and int(key) < len(many) else None
        else:
            tree = cast("Tree", tree).get(key) if isinstance(tree, dict) else getattr(tree, key, None)
    return tree


def with_other_spellings(given: object, *spellings: tuple[str, str]) -> object:
    """Return a section in which a key that is left out has the value of its other spelling, a path in the section."""
    if not isinstance(given, Mapping):
        return given
    section = dict(cast("Mapping[str, object]", given))
    for key, other in spellings:
        if section.get(key) is None and (value := value_at(section, other)) is not None:
            section[key] = value
    return section


def join_path(prefix: str, key: str) -> str:
    """Join two dotted YAML paths; either may be empty."""
    return f"{prefix}.{key}" if prefix and key else prefix or key


def _number_from_text(value: object) -> object:
    # YAML 1.1 parsers, and ${oc.env:...}, hand over a number such as 1e-3 as text.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def tuple_from_list(value: object) -> object:
    """Return a list as a tuple, and anything else unchanged."""
    return tuple(cast("list[object]", value)) if isinstance(value, list) else value


Float = Annotated[float, BeforeValidator(_number_from_text)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]
Seconds = Annotated[Float, Field(gt=0, le=2_000_000)]
"""A deadline: about three weeks at most, since the system's clocks count milliseconds in 31 bits."""
Fraction = Annotated[Float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""Of a tensor: what indexes it has 32 bits."""
Counted = Annotated[int, Field(ge=1, le=2_000)]
"""Layers and experts, which are counted one by one."""
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""Fits numpy's seeds, which are 32 bits and get the pipeline stage added, and the int64 keys of sampling."""
IntTuple = Annotated[tuple[int, ...], BeforeValidator(tuple_from_list)]
StrTuple = Annotated[tuple[str, ...], BeforeValidator(tuple_from_list)]


def absolute_path(path: str) -> str:
    """Return the path from the root, as it is seen from where the command is started."""
    return str(Path(path).absolute())


def folder_or_name(text: str) -> str:
    """Return a folder that is there as an absolute path, and any other text, such as a hub id, unchanged."""
    return absolute_path(text) if text != CHAR_TOKENIZER and Path(text).is_dir() else text


CHAR_TOKENIZER = "char"
"""The embedded character tokenizer, also where a folder has that name."""
_LONGEST_NAME, _LONGEST_PATH = 255, 4095


def _possible_folder(path: str) -> str:
    if "\0" in path:
        raise ValueError("has a NUL character, which no path has; remove it")
    if len(path.encode(errors="replace")) > _LONGEST_PATH or any(
        len(name.encode(errors="replace")) > _LONGEST_NAME for name in path.split("/")
    ):
        raise ValueError(
            f"is too long for a path: a name has at most {_LONGEST_NAME} bytes, a path {_LONGEST_PATH}"
        )
    return path


FolderName = Annotated[str, AfterValidator(_possible_folder)]
"""A folder that is written to, as it is seen from where the command is started."""
FolderPath = Annotated[str, AfterValidator(_possible_folder), AfterValidator(absolute_path)]
"""A folder that ranks open, which may run in another working directory than the driver."""
FolderOrName = Annotated[str, AfterValidator(folder_or_name)]
"""A folder that ranks open, or a name."""
