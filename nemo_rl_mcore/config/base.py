"""Strict frozen models, and problems that are collected and reported together."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

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
"""Kind of mistake; docs/configuration.md explains each code. Codes stay stable when messages are reworded."""


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration: its kind, location, description and remedy.

    related: other keys that the mistake depends on. where: "file:line", once the loader has located the key.
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
        """True if the problem is only a warning, such as a key that nothing reads."""
        return self.code == "has-no-effect"

    def below(self, prefix: str) -> "Problem":
        """Return the same problem with its path below the section `prefix`."""
        return self.at(lambda path: join_path(prefix, path))

    def at(self, key: "Key") -> "Problem":
        """Return the same problem with its paths mapped by `key`."""
        return replace(self, path=key(self.path), related=tuple(map(key, self.related)))


type Key = Callable[[str], str]
"""Maps a path within a section to its path in the recipe; `str` leaves the path unchanged."""
type Text[S] = str | Callable[[S], str]
type Fix[S] = str | Mapping[str, object] | Callable[[S], str | Mapping[str, object]]


@dataclass(frozen=True)
class Rule[S]:
    """A combination of keys that a section may not have: kind of mistake, key, condition, related keys and remedy.

    The message is built from the values at `path` and `related`, and names their keys as mapped by `Key`.
    fix: keys with values, any of which solves the problem, or text. why: a reason, added in brackets. says: a message
    that replaces the one built from the values.
    """

    code: Code
    path: str
    when: Callable[[S], object] | int
    related: tuple[str, ...] = ()
    fix: Fix[S] = ""
    why: Text[S] = ""
    says: Text[S] = ""

    def problem(self, section: S, key: Key = str) -> Problem | None:
        """Return the problem if the section breaks the rule, else None."""
        if not (self.when(section) if callable(self.when) else self.when):
            return None
        says = self.says(section) if callable(self.says) else self.says
        why = self.why(section) if callable(self.why) else self.why
        fix = self.fix(section) if callable(self.fix) else self.fix
        if not says:
            others = [_setting(key(one), value_at(section, one)) for one in self.related if one != self.path]
            listed = (
                " and ".join((", ".join(others[:-1]), others[-1])) if len(others) > 1 else "".join(others)
            )
            alone, together = _SENTENCES[self.code]
            says = (together if others else alone).format(as_yaml(value_at(section, self.path)), listed)
        if isinstance(fix, Mapping):
            fix = "set " + ", or ".join(_setting(key(path), value) for path, value in fix.items())
        return Problem(
            self.code,
            key(self.path),
            says + (f" ({why})" if why else ""),
            fix or _FIXES.get(self.code, ""),
            tuple(map(key, self.related)),
        )


type Rules[S] = tuple[Rule[S] | Callable[[S], Iterable[Rule[S] | Problem]], ...]
"""Rules, and functions that yield rules for sections with keys of the user's choice, such as sources."""


def either(
    code: Code, settings: Mapping[str, object], why: str = "", *, where: Callable[[Any], object] | None = None
) -> Rule[Any]:
    """Return a rule that at least one of the settings must hold, in sections for which `where` is true.

    The proposed fix is any of the settings.
    """
    path, *others = settings
    return Rule(
        code,
        path,
        lambda section: (
            all(value_at(section, key) != value for key, value in settings.items())
            and (where is None or where(section))
        ),
        tuple(others),
        settings,
        why,
    )


_SENTENCES: Mapping[Code, tuple[str, str]] = {
    "contradicts": ("{0} contradicts itself", "{0} contradicts {1}"),
    "has-no-effect": ("{0} has no effect here", "{0} has no effect with {1}"),
    "incompatible": ("{0} cannot be used in this recipe", "{0} cannot be combined with {1}"),
    "missing": ("is missing", "is required with {1}"),
    "no-signal": ("{0} leaves nothing to learn", "{0} with {1} leaves nothing to learn"),
    "not-allowed": ("{0} is not allowed", "{0} is not allowed with {1}"),
    "not-divisible": ("{0} does not divide evenly", "{0} does not fit {1} evenly"),
    "not-supported": ("{0} is not supported", "{0} is not supported with {1}"),
    "requires": ("{0} cannot be used here", "{0} is not allowed with {1}"),
    "too-large": ("{0} is too large", "{0} is too large for {1}"),
    "too-small": ("{0} is too small", "{0} is too small for {1}"),
}
"""Message for a value on its own, and message for a value together with related keys."""
_FIXES: Mapping[Code, str] = {
    "contradicts": "remove one, or make them agree",
    "has-no-effect": "remove it",
    "incompatible": "change one of them",
    "missing": "set it",
    "not-supported": "remove it",
    "requires": "change one of them",
    "too-large": "lower it",
    "too-small": "raise it",
}


def broken[S](rules: Rules[S], section: S, key: Key = str) -> Iterator[Problem]:
    """Yield a problem for each rule that a section breaks."""
    for row in rules:
        for one in (cast("Rule[S]", row),) if isinstance(row, Rule) else row(section):
            problem = one.at(key) if isinstance(one, Problem) else one.problem(section, key)
            if problem is not None:
                yield problem


def as_yaml(value: object) -> str:
    """Return a value in short YAML notation."""
    if value is None or isinstance(value, bool):
        return str({None: "null", True: "true", False: "false"}[value])
    if isinstance(value, BaseModel | dict):
        return "this section"
    if isinstance(value, list | tuple):
        ones = cast("list[object]", value)
        if any(isinstance(one, BaseModel | dict) for one in ones):
            return "this list"
        text = f"[{', '.join(map(as_yaml, ones))}]"
    else:
        text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _setting(path: str, value: object) -> str:
    return path if isinstance(value, BaseModel | dict) else f"{path}: {as_yaml(value)}"


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
        text = str(self.problems[0]) if len(self.problems) == 1 else ""
        if not text:
            lines = "\n".join(f"  {number}. {one}" for number, one in enumerate(self.problems, start=1))
            text = f"{len(self.problems)} problems in the configuration:\n{lines}"
        super().__init__(text)


def refused(code: Code, path: str, what: str, remedy: str = "", where: str = "") -> ConfigError:
    """Return the error for a configuration with one problem."""
    return ConfigError([Problem(code, path, what, remedy, where=where)])


class StrictModel(BaseModel):
    """A frozen section that rejects unknown keys and does not coerce types.

    Construction checks each field on its own. `rules` holds the rules between its fields, applied by `checked`; rules
    between sections are in recipe/rules. `recipe.validate` reports all of them for a recipe.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    rules: ClassVar[Rules[Any]] = ()
    """Rules between the section's own fields; paths are relative to the section."""
    read_unless: ClassVar[tuple[tuple[str, str, object], ...]] = ()
    """Tuples of a key, another key of the section, and the other key's value with which nothing reads the first."""


class Switched(StrictModel):
    """A section that does nothing unless it is enabled."""

    enabled: bool = False
    """Turn the section on."""


class SwitchedOn(StrictModel):
    """A section that is enabled unless a recipe turns it off."""

    enabled: bool = True
    """Turn the section on; the section's description explains the effect of false."""


def collect_problems(value: object, key: Key = str) -> Iterator[Problem]:
    """Yield each problem in a section and its subsections, and a warning for each key that nothing reads."""
    inside: Mapping[Any, object] = {}
    if isinstance(value, StrictModel):
        yield from broken(value.rules, value, key)
        fields, idle = type(value).model_fields, dict[str, Rule[StrictModel]]()
        for name, switch, off in value.read_unless:
            if getattr(value, switch) == off and getattr(value, name) != fields[name].default:
                idle.setdefault(name, Rule("has-no-effect", name, when=True, related=(switch,)))
        yield from broken(tuple(idle.values()), value, key)
        inside = {name: getattr(value, name) for name in fields}
    elif isinstance(value, tuple):
        inside = dict(enumerate(cast("tuple[object, ...]", value)))
    elif isinstance(value, dict):
        inside = cast("Tree", value)
    for name, one in inside.items():
        yield from collect_problems(one, lambda path, name=name: key(join_path(str(name), path)))


def checked[Section: StrictModel](kind: type[Section], given: Section | Mapping[str, object]) -> Section:
    """Return a section, or build it from a mapping, and raise ConfigError with every rule of its own that it breaks.

    Rules between sections are in `recipe.rules`.
    """
    section = given if isinstance(given, kind) else kind.model_validate(given)
    if found := tuple(problem for problem in collect_problems(section) if not problem.warns):
        raise ConfigError(found)
    return section


Tree = dict[str, object]
"""An unchecked recipe or section."""


def value_at(tree: object, path: str) -> object:
    """Return the value at a path, or None if the path does not exist; list indices are path components."""
    for key in path.split("."):
        if isinstance(tree, list | tuple):
            many = cast("list[object]", tree)
            tree = many[int(key)] if key.isdecimal() and int(key) < len(many) else None
        else:
            tree = cast("Tree", tree).get(key) if isinstance(tree, dict) else getattr(tree, key, None)
    return tree


def join_path(prefix: str, key: str) -> str:
    """Join two dotted YAML paths; either may be empty."""
    return f"{prefix}.{key}" if prefix and key else prefix or key


def _number_from_text(value: object) -> object:
    # YAML 1.1 parsers and ${oc.env:...} return a number such as 1e-3 as text.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def tuple_from_list(value: object) -> object:
    """Convert a list to a tuple; return anything else unchanged."""
    return tuple(cast("list[object]", value)) if isinstance(value, list) else value


Float = Annotated[float, BeforeValidator(_number_from_text)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]
Seconds = Annotated[Float, Field(gt=0, le=2_000_000)]
"""A deadline of at most about three weeks, since system timers count milliseconds in 31 bits."""
Fraction = Annotated[Float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""Size of a tensor dimension, which is indexed with 32 bits."""
Counted = Annotated[int, Field(ge=1, le=2_000)]
"""Number of layers or experts, bounded because code iterates over them."""
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""Seed that fits numpy's 32-bit seeds, even after the pipeline stage is added, and the int64 keys of sampling."""
IntTuple = Annotated[tuple[int, ...], BeforeValidator(tuple_from_list)]
StrTuple = Annotated[tuple[str, ...], BeforeValidator(tuple_from_list)]


def absolute_path(path: str) -> str:
    """Return an absolute path, resolved from the working directory."""
    return str(Path(path).absolute())


def folder_or_name(text: str) -> str:
    """Return an existing folder as an absolute path, and any other text, such as a hub id, unchanged."""
    return absolute_path(text) if text != CHAR_TOKENIZER and Path(text).is_dir() else text


CHAR_TOKENIZER = "char"
"""Name of the embedded character tokenizer, which takes precedence over a folder of that name."""
_LONGEST_NAME, _LONGEST_PATH = 255, 4095


def _possible_folder(path: str) -> str:
    if "\0" in path:
        raise ValueError("contains a NUL character; remove it")
    if len(path.encode(errors="replace")) > _LONGEST_PATH or any(
        len(name.encode(errors="replace")) > _LONGEST_NAME for name in path.split("/")
    ):
        raise ValueError(
            f"is too long for a path: a name has at most {_LONGEST_NAME} bytes, a path {_LONGEST_PATH}"
        )
    return path


FolderName = Annotated[str, AfterValidator(_possible_folder)]
"""A folder for output, relative to the working directory."""
FolderPath = Annotated[str, AfterValidator(_possible_folder), AfterValidator(absolute_path)]
"""A folder that ranks open; made absolute, since ranks may have another working directory than the driver."""
FolderOrName = Annotated[str, AfterValidator(folder_or_name)]
"""A folder that ranks open, made absolute, or a name."""
