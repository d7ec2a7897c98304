"""Strict frozen models, and problems that are collected instead of thrown one by one."""

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
        return self.at(lambda path: join_path(prefix, path))

    def at(self, key: "Key") -> "Problem":
        """Return the same problem with its paths where `key` says that they are."""
        return replace(self, path=key(self.path), related=tuple(map(key, self.related)))


type Key = Callable[[str], str]
"""Where the recipe has what is at a path of a section; `str` leaves the path as it is."""
type Text[S] = str | Callable[[S], str]
type Fix[S] = str | Mapping[str, object] | Callable[[S], str | Mapping[str, object]]


@dataclass(frozen=True)
class Rule[S]:
    """A row of what does not go together in a section: its kind, the key, when, the other keys, and the way out.

    The message is made of the values at `path` and `related`, and names them where `Key` says that they are.
    fix: keys and values to set, any of them; or words. why: a reason, told in brackets. says: what is told in place of
    all that, where values do not say it.
    """

    code: Code
    path: str
    when: Callable[[S], object] | int
    related: tuple[str, ...] = ()
    fix: Fix[S] = ""
    why: Text[S] = ""
    says: Text[S] = ""

    def problem(self, section: S, key: Key = str) -> Problem | None:
        """Return the problem of a section that breaks the rule."""
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
"""Rows; a function makes those of a section whose keys are the user's own, such as sources."""

_SENTENCES: Mapping[Code, tuple[str, str]] = {
    "contradicts": ("{0} contradicts itself", "{0} contradicts {1}"),
    "has-no-effect": ("{0} has no effect here", "{0} has no effect with {1}"),
    "incompatible": ("{0} does not go with this recipe", "{0} does not go with {1}"),
    "missing": ("missing", "missing with {1}"),
    "no-signal": ("{0} leaves nothing to learn from", "{0} leaves nothing to learn from with {1}"),
    "not-allowed": ("{0} is not allowed", "{0} is not allowed with {1}"),
    "not-divisible": ("{0} does not divide evenly", "{0} does not divide evenly with {1}"),
    "not-supported": ("{0} is not supported", "{0} is not supported with {1}"),
    "requires": ("{0} is not possible here", "{0} is not possible with {1}"),
    "too-large": ("{0} is too large", "{0} is too large for {1}"),
    "too-small": ("{0} is too small", "{0} is too small for {1}"),
}
"""What is told of a value, alone and with the other keys."""
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
    """Yield the problem of each rule that a section breaks."""
    for row in rules:
        for one in (cast("Rule[S]", row),) if isinstance(row, Rule) else row(section):
            problem = one.at(key) if isinstance(one, Problem) else one.problem(section, key)
            if problem is not None:
                yield problem


def as_yaml(value: object) -> str:
    """Return a value as a recipe has it, in short."""
    if value is None or isinstance(value, bool):
        return str({None: "null", True: "true", False: "false"}[value])
    if isinstance(value, BaseModel | dict):
        return "the section"
    if isinstance(value, tuple):
        value = list(cast("tuple[object, ...]", value))
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


class StrictModel(BaseModel):
    """A frozen section: unknown keys are errors, and nothing is coerced from one type into another.

    Construction checks each field alone. The rules between its own fields are `rules`, which `checked` applies; those
    between sections are in recipe/rules. `recipe.validate` reports all of them for a recipe.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    rules: ClassVar[Rules[Any]] = ()
    """What does not go together in the section; paths are relative to it."""
    read_unless: ClassVar[tuple[tuple[str, str, object], ...]] = ()
    """A key, another key of the section, and the value of that with which nothing reads the first."""


class SwitchedConfig(StrictModel):
    """A section that does nothing unless it is enabled."""

    enabled: bool = False
    """Whether any of it is done."""


def collect_problems(section: StrictModel, key: Key = str) -> Iterator[Problem]:
    """Yield what is wrong within a section and within each section inside it, and the keys that nothing reads."""
    yield from broken(section.rules, section, key)
    fields, idle = type(section).model_fields, dict[str, Rule[StrictModel]]()
    for name, switch, off in section.read_unless:
        if getattr(section, switch) == off and getattr(section, name) != fields[name].default:
            idle.setdefault(name, Rule("has-no-effect", name, when=True, related=(switch,)))
    yield from broken(tuple(idle.values()), section, key)
    for name in fields:
        yield from _problems_inside(getattr(section, name), name, key)


def checked[Section: StrictModel](kind: type[Section], given: Section | Mapping[str, object]) -> Section:
    """Return a section, or the equal mapping, that meets its own rules; raises ConfigError with every one it breaks.

    Rules between sections are those of a recipe, see `recipe.rules`.
    """
    section = given if isinstance(given, kind) else kind.model_validate(given)
    if found := tuple(problem for problem in collect_problems(section) if not problem.warns):
        raise ConfigError(found)
    return section


def _problems_inside(value: object, path: str, key: Key) -> Iterator[Problem]:
    if isinstance(value, StrictModel):
        yield from collect_problems(value, lambda inner: key(join_path(path, inner)))
    elif isinstance(value, tuple):
        for place, one in enumerate(cast("tuple[object, ...]", value)):
            yield from _problems_inside(one, join_path(path, str(place)), key)
    elif isinstance(value, dict):
        for name, one in cast("dict[str, object]", value).items():
            yield from _problems_inside(one, join_path(path, str(name)), key)


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
