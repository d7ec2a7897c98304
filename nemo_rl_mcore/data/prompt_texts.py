"""What stands around a prompt: a text with a place for it, and a system prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.source import SourceDefaults
from nemo_rl_mcore.data.messages import Context, Message


@dataclass(frozen=True)
class PromptTexts:
    """The text with a {} in the place of the prompt, and the system prompt; null where there is none."""

    around: str | None = None
    system: str | None = None

    def shown(self, context: Context, *, chat: bool) -> Context:
        """Return the prompt with its texts; in a conversation the first user message gets the text, as in NeMo RL.

        A conversation that begins with a system's message keeps that one.
        """
        if isinstance(context, str):
            text = context if self.around is None else self.around.format(context)
            if self.system is None:
                return text
            return (
                (_of_recipe(self.system), Message("user", text, self._around))
                if chat
                else f"{self.system}\n{text}"
            )
        messages = list(context)
        asked = [place for place, message in enumerate(messages) if message.role == "user"]
        if self.around is not None and asked:
            message = messages[asked[0]]
            content = self.around.format(message.content)
            messages[asked[0]] = replace(message, content=content, frame=self._around)
        if self.system is not None and messages[0].role != "system":
            messages.insert(0, _of_recipe(self.system))
        return tuple(messages)

    def frame(self, *, chat: bool) -> tuple[int, int]:
        """Return how many characters stand before and after a prompt where `shown` gives it as a text."""
        before, behind = self._around
        return before + (0 if self.system is None or chat else len(self.system) + 1), behind

    @property
    def _around(self) -> tuple[int, int]:
        if self.around is None:
            return 0, 0
        lengths, place = [0, 0], 0
        for text, field, *_ in Formatter().parse(self.around):
            lengths[place] += len(text)
            place = 1 if field is not None else place
        return lengths[0], lengths[1]


def _of_recipe(text: str) -> Message:
    return Message("system", text, (len(text), 0))


def read_texts(source: SourceDefaults) -> tuple[PromptTexts, list[Problem]]:
    """Return the texts of a source; problems with their files name paths relative to the source.

    A text with a problem is left out: rows can be read without it, and nothing in it is evaluated.
    """
    around, of_prompt = _read("prompt_file", source.prompt_file)
    system, of_system = _read("system_prompt_file", source.system_prompt_file)
    misplaced = [] if around is None else [*_place_problems(str(source.prompt_file), around)]
    return PromptTexts(None if misplaced else around, system), [*of_prompt, *of_system, *misplaced]


def _read(key: str, path: str | None) -> tuple[str | None, list[Problem]]:
    if path is None:
        return None, []
    try:
        return Path(path).read_text(encoding="utf-8-sig"), []
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
        what = f"{path!r} cannot be read: {reason}"
        return None, [Problem("not-readable", key, what, f"name a file beside the recipe or in {Path.cwd()}")]


def _place_problems(path: str, text: str) -> Iterator[Problem]:
    """Yield a text that is not one place for the prompt and words around it: no other field is ever evaluated."""
    try:
        fields = [(name, kind, how) for _, name, kind, how in Formatter().parse(text) if name is not None]
    except ValueError as error:
        fields, reason = [], f"holds a brace alone ({error})"
    else:
        reason = f"has {len(fields)} places for the prompt"
        if any(field != ("", "", None) for field in fields):
            reason = "holds braces with something in them"
    if fields != [("", "", None)]:
        remedy = r"write {} once, where the prompt stands, and double all other braces, as in \boxed{{}}"
        yield Problem("not-allowed", "prompt_file", f"{path!r} {reason}", remedy)
