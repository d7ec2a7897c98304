"""A request's body: missing fields take the run's values; fields that would sample differently are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, PositiveInt, ValidationError

from nemo_rl_mcore.agents.chat import Chat, Claim, ToolParser
from nemo_rl_mcore.agents.session import ClosedSessionError, Room, SessionError, UnknownSessionError
from nemo_rl_mcore.data.chat import ASSISTANT
from nemo_rl_mcore.data.messages import Message, MessageError, read_message
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.engine.engine import EngineDiedError
from nemo_rl_mcore.errors import RunStoppedError


@dataclass(frozen=True)
class RunSampling:
    """The run's sampling; a call may repeat these values or leave them out.

    top_k: None keeps all tokens. max_new_tokens: per answer. stop_strings, stop_ids: end an answer and belong to it;
    the ids include the end of sequence.
    """

    temperature: float
    top_p: float
    top_k: int | None
    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class EndpointOptions:
    """model: its name. context: most tokens of prompt and answer together.

    version: returns the current weight version. health: returns further fields of `/health`. failed: called with the
    endpoint's own errors. body_limit, body_seconds: bytes of a request, and the time to receive them. bodies_limit:
    bytes of all requests being read. write_seconds: time for a client to accept an answer.
    """

    model: str
    context: int
    tokenizer: Tokenizer
    sampling: RunSampling
    tool_parser: ToolParser
    version: Callable[[], int]
    failed: Callable[[BaseException], None]
    health: Callable[[], Mapping[str, Any]] = dict
    body_limit: int = 32 << 20
    body_seconds: float = 30.0
    bodies_limit: int = 256 << 20
    write_seconds: float = 30.0


class RefusedCallError(Exception):
    """A refused request, with its HTTP status. param: the field at fault; code: for clients."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status, self.headers = param, code, status, headers or {}


def refusal_of(error: BaseException) -> RefusedCallError | None:
    """Return the refusal for an error; None for an error of the endpoint itself."""
    match error:
        case RefusedCallError():
            return error
        case UnknownSessionError():
            headers = {"www-authenticate": "Bearer"}
            return RefusedCallError(str(error), code=error.code, status=401, headers=headers)
        case SessionError():
            status = 410 if isinstance(error, ClosedSessionError) else 400
            return RefusedCallError(str(error), code=error.code, status=status)
        case EngineDiedError():
            return busy("the engine that answered has died; another one will answer")
        case RunStoppedError():
            return RefusedCallError("the engine has not answered", code="engine_failed", status=500)
        case _:
            return None


def busy(message: str) -> RefusedCallError:
    return RefusedCallError(message, code="try_again", status=503, headers={"retry-after": "1"})


type Body = Mapping[str, Any]

_NEUTRAL: dict[str, Sequence[object]] = {
    **dict.fromkeys(("n", "best_of", "repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens", "top_logprobs"), (0,)),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "echo", "continue_final_message"), (False,)),
    **dict.fromkeys(("bad_words", "logits_processors", "functions", "documents"), ([],)),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), ()
    ),
    **dict.fromkeys(("seed", "prompt_logprobs", "allowed_token_ids", "chat_template", "features"), ()),
    **dict.fromkeys(("content_parts", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("tool_choice", "function_call"), ("auto", "none")),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "add_generation_prompt": (True,),
}
"""Allowed values, besides null, of fields that would change the sampling."""
_OF_BEGUN = {"continue_final_message": (True,), "add_generation_prompt": (False,)}
"""The same, for a conversation that ends with the beginning of its answer."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class _Read(BaseModel):
    """A body's known fields; null counts as missing."""

    model_config = ConfigDict(strict=True)


class _Sampling(_Read):
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: FiniteFloat | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=1000)]],
            Field(max_length=16),
            BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
        ]
        | None
    ) = None
    stop_token_ids: list[Any] | None = None


class _Shape(_Read):
    class StreamOptions(_Read):
        include_usage: bool | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None


class _Tool(_Read):
    class Function(_Read):
        name: str

    function: Function


class _ChatBody(_Read):
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None


class Rewards(_Read):
    reward: FiniteFloat | None = None
    rewards: dict[str, FiniteFloat] | None = None


def read_as[Model: _Read](model: type[Model], body: object) -> Model:
    """Validate a body; raises RefusedCallError with the first wrong field."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)[0]
        path = ".".join(str(part) for part in wrong["loc"] if isinstance(part, str))
        raise RefusedCallError(f"{path}: {wrong['msg']}, got {wrong['input']!r:.100}", param=path) from error


@dataclass(frozen=True)
class Wishes:
    """A request without its prompt.

    max_tokens: None for the run's. stop, stop_ids: end the answer in addition to the run's. logprobs: return the
    answer's; names_ids: name tokens `token_id:N` in them. token_ids: return those of prompt and answer.
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
    """Read a body; sampling: the object with the sampling values, if not the body. Raises RefusedCallError."""
    values, run = body if sampling is None else sampling, options.sampling
    if body.get("model") not in (None, options.model):
        what = f"there is no model {body['model']!r:.100}; this endpoint has {options.model!r}"
        raise RefusedCallError(what, param="model", code="model_not_found", status=404)
    for place in (body, values):
        ends = place.get("messages")
        last: object = cast("list[object]", ends)[-1] if isinstance(ends, list) and ends else None
        begun = isinstance(last, dict) and cast("Body", last).get("role") == ASSISTANT
        for name, allowed in (_NEUTRAL | _OF_BEGUN if begun else _NEUTRAL).items():
            said = place.get(name)
            # In Python, True == 1.
            alike = (isinstance(said, bool) == isinstance(value, bool) and said == value for value in allowed)
            if said is not None and not any(alike):
                only = " or ".join(json.dumps(value) for value in (*allowed, None))
                what = f"{name} is not supported: got {said!r:.100}, allowed is {only}"
                raise RefusedCallError(what, param=name, code="unsupported_parameter")
    asked, shape, logprobs = read_as(_Sampling, values), read_as(_Shape, body), values.get("logprobs")
    if logprobs not in (None, False, True, 0, 1):
        what = (
            f"logprobs is {logprobs!r:.100}; there are those of the sampled tokens alone: true, false, 0 or 1"
        )
        raise RefusedCallError(what, param="logprobs", code="unsupported_parameter")
    keeps_all = asked.top_k in (-1, 0) and run.top_k in (None, 0)
    given = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k}
    for name, value in given.items():
        own = getattr(run, name)
        if value is not None and value != own and not (name == "top_k" and keeps_all):
            what = f"{name} is {value!r:.100}, but this run samples with {name} {own!r}: leave it out"
            raise RefusedCallError(what, param=name, code="sampling_differs")
    counts = [one for one in (asked.max_tokens, asked.max_completion_tokens) if one is not None]
    stop_ids = ids_of(asked.stop_token_ids or [], "stop_token_ids", options)
    return Wishes(
        max_tokens=min(counts) if counts and min(counts) < run.max_new_tokens else None,
        stop=tuple(asked.stop or ()),
        stop_ids=frozenset(stop_ids) - run.stop_ids,
        stream=bool(shape.stream),
        include_usage=bool(shape.stream_options and shape.stream_options.include_usage),
        logprobs=logprobs is not None and logprobs is not False,
        names_ids=bool(shape.return_tokens_as_token_ids),
        token_ids=bool(shape.return_token_ids),
    )


def chat_of(body: Body, room: Room) -> Chat:
    """Read a body's conversation; raises as `prompt_of`. Each message counts as one token or more.

    Messages keep only OpenAI's fields and their claims of ids.
    """
    asked = read_as(_ChatBody, body)
    if not asked.messages:
        raise RefusedCallError("messages are missing", param="messages")
    room(len(asked.messages))
    messages, claims = list[Message](), list[Claim | None]()
    for place, given in enumerate(asked.messages):
        path = f"messages[{place}]"
        try:
            message = read_message(given, path)
        except MessageError as error:
            raise RefusedCallError(str(error), param=error.path) from error
        if message.role not in _ROLES:
            what = f"{path}.role is {message.role!r:.100}; known roles are {', '.join(_ROLES)}"
            raise RefusedCallError(what, param=f"{path}.role")
        claim, reasoning = None, ""  # anything but lists of ids claims nothing
        if message.role == ASSISTANT:
            said = cast("dict[str, Any]", given)
            reasoning = message.reasoning or said.get("reasoning") or ""
            if not isinstance(reasoning, str):
                raise RefusedCallError(f"{path}.reasoning must be text", param=f"{path}.reasoning")
            shown, answered = said.get("prompt_token_ids"), said.get("generation_token_ids")
            if isinstance(shown, list) and isinstance(answered, list) and answered:
                claim = Claim(tuple(cast("list[int]", shown)), tuple(cast("list[int]", answered)))
        messages.append(replace(message, role=_ROLES[message.role], reasoning=reasoning, more={}))
        claims.append(claim)
    for place, tool in enumerate(asked.tools or ()):
        try:
            read_as(_Tool, tool)
        except RefusedCallError as error:
            path = f"tools[{place}]"
            raise RefusedCallError(f"{path} must be a function with a name", param=path) from error
    return Chat(
        tuple(messages),
        tuple(claims),
        asked.tools or () if body.get("tool_choice") != "none" else (),
        asked.chat_template_kwargs or {},
        bool(asked.continue_final_message),
    )


def prompt_of(body: Body, options: EndpointOptions, room: Room) -> list[int]:
    """Return the ids of a completion's prompt: a text or a list of ids, or a list with one of these.

    Raises RefusedCallError, and NoRoomError, without encoding, for a text whose length alone is too large.
    """
    given = cast("object", body.get("prompt"))
    several = cast("list[object]", given) if isinstance(given, list) else []
    if len(several) == 1 and isinstance(several[0], list | str):
        [given] = several
    if not isinstance(given, str):
        return ids_of(cast("object", given), "prompt", options, room)
    room(options.tokenizer.fewest_tokens(len(given)))
    try:
        return options.tokenizer.encode(given)  # special tokens are parsed; no begin of sequence is added
    except (ValueError, TypeError) as error:
        raise RefusedCallError(f"prompt cannot be encoded: {error}", param="prompt") from error


def ids_of(given: object, name: str, options: EndpointOptions, room: Room | None = None) -> list[int]:
    """Read token ids; raises as `prompt_of`."""
    size = options.tokenizer.vocab_size
    if isinstance(given, list):
        ids = cast("list[object]", given)
        if room is not None:
            room(len(ids))
        if all(type(token) is int and 0 <= token < size for token in ids):
            return cast("list[int]", ids)
    raise RefusedCallError(f"{name} must be a list of token ids from 0 to {size - 1}", param=name)
