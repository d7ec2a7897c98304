"""What the body of a request may say: what is left out is the run's, what would draw otherwise is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from nemo_rl_mcore.agents.chat import Chat, Claim
from nemo_rl_mcore.agents.options import EndpointOptions, RunSampling
from nemo_rl_mcore.agents.refusals import RefusedCallError
from nemo_rl_mcore.agents.session import Room
from nemo_rl_mcore.data.chat import ASSISTANT
from nemo_rl_mcore.data.messages import Message, MessageError, read_message

type Body = Mapping[str, Any]

_NEUTRAL: dict[str, Sequence[object]] = {
    "n": (1,),
    "best_of": (1,),
    "seed": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "documents": ([],),
    "features": (),
    "content_parts": (),
    "truncate_prompt_tokens": (),
}
"""What may be said of a field that would change how answers are drawn, besides null; nothing else is known to do so."""
_OF_BEGUN = {"continue_final_message": (True,), "add_generation_prompt": (False,)}
"""The same, of a conversation that ends with the beginning of its answer."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_ALL = -1
"""The value of top_k that keeps all tokens, as 0 does."""
_MOST_STOPS, _LONGEST_STOP = 16, 1000


@dataclass(frozen=True)
class Wishes:
    """What a request says besides its prompt.

    max_tokens: None where it is the run's. stop, stop_ids: end the answer besides those of the run. logprobs: of the
    answer; names_ids: in them tokens are called `token_id:N`. token_ids: of prompt and answer, wherever they stand.
    """

    max_tokens: int | None
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    stream: bool
    include_usage: bool
    logprobs: bool
    names_ids: bool
    token_ids: bool


def wishes_of(body: Body, options: EndpointOptions, sampling: Body | None = None) -> Wishes:
    """Read a body; sampling: where values of sampling are, if not in the body itself. Raises RefusedCallError."""
    values = body if sampling is None else sampling
    _require_model(body, options.model)
    for place in (body, values):
        _require_neutral(place)
    _require_runs(values, options.sampling)
    streaming = _object(body, "stream_options") or {}
    return Wishes(
        max_tokens=_max_tokens(values, options.sampling.max_new_tokens),
        stop=_stop(values),
        stop_ids=frozenset(_ids(values.get("stop_token_ids") or [], "stop_token_ids", options))
        - options.sampling.stop_ids,
        stream=_flag(body, "stream"),
        include_usage=_flag(streaming, "include_usage"),
        logprobs=_wants_logprobs(values),
        names_ids=_flag(body, "return_tokens_as_token_ids"),
        token_ids=_flag(body, "return_token_ids"),
    )


def chat_of(body: Body, room: Room) -> Chat:
    """Read the conversation of a body, of which each message is a token or more; raises as `prompt_of`."""
    given = _list(body, "messages")
    if not given:
        raise RefusedCallError("messages are missing", param="messages")
    room(len(given))
    read = [_message(message, f"messages[{place}]") for place, message in enumerate(given)]
    tools = _tools(body) if body.get("tool_choice") != "none" else ()
    messages, claims = zip(*read, strict=True)
    return Chat(
        messages,
        claims,
        tools,
        _object(body, "chat_template_kwargs") or {},
        _flag(body, "continue_final_message"),
    )


def prompt_of(body: Body, options: EndpointOptions, room: Room) -> list[int]:
    """Return the ids of the prompt of a completion: one text, or one list of ids, also as the only one of a list.

    Raises RefusedCallError, and NoRoomError for what is too long by its length alone: it is not encoded.
    """
    given = cast("object", body.get("prompt"))
    several = cast("list[object]", given) if isinstance(given, list) else []
    if len(several) == 1 and isinstance(several[0], list | str):
        [given] = several
    if not isinstance(given, str):
        return _ids(cast("object", given), "prompt", options, room)
    room(options.tokenizer.fewest_tokens(len(given)))
    try:
        return options.tokenizer.encode(given)  # special tokens are those tokens; nothing is put before it
    except (ValueError, TypeError) as error:
        raise RefusedCallError(f"prompt cannot be encoded: {error}", param="prompt") from error


def token_ids_of(body: Body, options: EndpointOptions, room: Room) -> list[int]:
    """Return the ids of the prompt of a generation; raises as `prompt_of`."""
    return _ids(body.get("token_ids"), "token_ids", options, room)


def sampling_params_of(body: Body) -> Body:
    """Return the sampling parameters of a generation."""
    return _object(body, "sampling_params") or {}


def rewards_of(body: Body) -> tuple[float | None, dict[str, float]]:
    """Return the reward of a session, None where it gives none, and its parts by name."""
    reward = body.get("reward")
    parts = _object(body, "rewards") or {}
    return (
        None if reward is None else _number(reward, "reward"),
        {name: _number(part, f"rewards.{name}") for name, part in parts.items()},
    )


def _require_model(body: Body, model: str) -> None:
    given = body.get("model")
    if given is not None and given != model:
        raise RefusedCallError(
            f"there is no model {given!r:.100}; this endpoint has {model!r}",
            param="model",
            code="model_not_found",
            status=404,
        )


def _require_neutral(values: Body) -> None:
    ends = values.get("messages")
    last: object = cast("list[object]", ends)[-1] if isinstance(ends, list) and ends else None
    begun = isinstance(last, dict) and cast("Body", last).get("role") == ASSISTANT
    for name, allowed in (_NEUTRAL | _OF_BEGUN if begun else _NEUTRAL).items():
        given = values.get(name)
        if given is None or any(given == value and _alike(given, value) for value in allowed):
            continue
        only = " or ".join(json.dumps(value) for value in (*allowed, None))
        raise RefusedCallError(
            f"{name} is not supported: got {given!r:.100}, allowed is {only}",
            param=name,
            code="unsupported_parameter",
        )


def _alike(given: object, value: object) -> bool:
    """Return whether neither is a flag, or both are: True is 1 to Python."""
    return isinstance(given, bool) == isinstance(value, bool)


def _require_runs(values: Body, run: RunSampling) -> None:
    for name, own in (("temperature", run.temperature), ("top_p", run.top_p)):
        given = values.get(name)
        if given is not None and _number(given, name) != own:
            raise _differs(name, given, own)
    if values.get("top_k") is not None:
        given = _number(values["top_k"], "top_k")
        if given != (run.top_k or 0) and not (given == _ALL and run.top_k is None):
            raise _differs("top_k", values["top_k"], run.top_k)


def _differs(name: str, given: object, own: object) -> RefusedCallError:
    return RefusedCallError(
        f"{name} is {given!r:.100}, but this run samples with {name} {own!r}: leave it out",
        param=name,
        code="sampling_differs",
    )


def _max_tokens(values: Body, most: int) -> int | None:
    given = [_count(values, name) for name in ("max_tokens", "max_completion_tokens")]
    least = min((count for count in given if count is not None), default=most)
    return least if least < most else None


def _count(values: Body, name: str) -> int | None:
    given = values.get(name)
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
        return given
    raise RefusedCallError(f"{name} must be a positive integer, got {given!r:.100}", param=name)


def _stop(values: Body) -> tuple[str, ...]:
    given: object = values.get("stop")
    texts = [given] if isinstance(given, str) else _list(values, "stop") or []
    if not all(isinstance(text, str) and text for text in texts):
        raise RefusedCallError("stop must be a text, or a list of texts", param="stop")
    if len(texts) > _MOST_STOPS or any(len(str(text)) > _LONGEST_STOP for text in texts):
        raise RefusedCallError(
            f"stop may hold {_MOST_STOPS} texts of {_LONGEST_STOP} characters each", param="stop"
        )
    return tuple(map(str, texts))


def _wants_logprobs(values: Body) -> bool:
    given = values.get("logprobs")
    if given not in (None, False, True, 0, 1):
        raise RefusedCallError(
            f"logprobs is {given!r:.100}; there are those of the sampled tokens alone: true, false, 0 or 1",
            param="logprobs",
            code="unsupported_parameter",
        )
    return given is not None and given is not False


def _message(given: object, path: str) -> tuple[Message, Claim | None]:
    """Read a message, of which the template gets the fields that OpenAI knows alone."""
    try:
        message = read_message(given, path)
    except MessageError as error:
        raise RefusedCallError(str(error), param=error.path) from error
    said = cast("dict[str, Any]", given)
    if message.role not in _ROLES:
        raise RefusedCallError(
            f"{path}.role is {message.role!r:.100}; known roles are {', '.join(_ROLES)}", param=f"{path}.role"
        )
    if message.role != ASSISTANT:
        return replace(message, role=_ROLES[message.role], reasoning="", more={}), None
    reasoning = message.reasoning or _of_type(said, "reasoning", str, path) or ""
    return replace(message, reasoning=reasoning, more={}), _claim(said)


def _claim(said: Body) -> Claim | None:
    """Return the ids of a message; what is no list of them claims nothing."""
    asked, answered = said.get("prompt_token_ids"), said.get("generation_token_ids")
    if not isinstance(asked, list) or not isinstance(answered, list) or not answered:
        return None
    return Claim(tuple(cast("list[int]", asked)), tuple(cast("list[int]", answered)))


def _tools(body: Body) -> list[dict[str, Any]]:
    tools = _list(body, "tools") or []
    for place, tool in enumerate(tools):
        path = f"tools[{place}]"
        function = _object(cast("dict[str, Any]", tool), "function", path) if isinstance(tool, dict) else None
        if function is None or not isinstance(function.get("name"), str):
            raise RefusedCallError(f"{path} must be a function with a name", param=path)
    return cast("list[dict[str, Any]]", tools)


def _ids(given: object, name: str, options: EndpointOptions, room: Room | None = None) -> list[int]:
    size = options.tokenizer.vocab_size
    if isinstance(given, list):
        ids = cast("list[object]", given)
        if room is not None:
            room(len(ids))
        if all(type(token) is int and 0 <= token < size for token in ids):
            return cast("list[int]", ids)
    raise RefusedCallError(f"{name} must be a list of token ids from 0 to {size - 1}", param=name)


def _of_type[T](values: Body, name: str, kind: type[T], path: str = "") -> T | None:
    given: object = values.get(name)
    if given is None or isinstance(given, kind):
        return given
    where = f"{path}.{name}" if path else name
    raise RefusedCallError(f"{where} must be of type {kind.__name__}, got {given!r:.100}", param=where)


def _list(values: Body, name: str, path: str = "") -> list[object] | None:
    return cast("list[object] | None", _of_type(values, name, list, path))


def _object(values: Body, name: str, path: str = "") -> dict[str, Any] | None:
    return cast("dict[str, Any] | None", _of_type(values, name, dict, path))


def _flag(values: Body, name: str) -> bool:
    return bool(_of_type(values, name, bool))


def _number(given: object, name: str) -> float:
    if isinstance(given, int | float) and not isinstance(given, bool):
        try:
            number = float(given)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise RefusedCallError(f"{name} must be a number, got {given!r:.100}", param=name)
