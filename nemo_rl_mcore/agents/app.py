"""Routes of the endpoint: the token selects the session, the body gives the prompt, the session samples the answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_rl_mcore.agents import requests
from nemo_rl_mcore.agents.chat import ChatPrompt, History, calls_of, flaws_of
from nemo_rl_mcore.agents.requests import Body, EndpointOptions, RefusedCallError, Wishes, busy, refusal_of
from nemo_rl_mcore.agents.server import CONNECTION, HEADER_BYTES, Connection
from nemo_rl_mcore.agents.session import Call, ClosedSessionError, Session, Sessions, UnknownSessionError
from nemo_rl_mcore.data.chat import ASSISTANT
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.strict_json import parse_json
from nemo_rl_mcore.data.tokenizer import token_texts

_PREFIXES = ("", "/sessions/{token}", "/ng-rollout/{token}")
_TOKEN_FIELDS = ("rollout", "session")
_RETRY = "x-stainless-retry-count"
_WITHIN_S = 30.0

type _Serve = Callable[[Request], Awaitable[Response]]


class _ClientGoneError(Exception):
    """The client disconnected before its answer was ready."""


class Answer:
    """A model call, with its response in each client's format.

    ids, logprobs: the sampled tokens'. spoken_ids: ids without a final stop token. versions: weight versions with
    their token ranges, in vLLM's format. version: the last token's weight version. name: the call's id.
    """

    def __init__(self, call: Call, wishes: Wishes, options: EndpointOptions) -> None:
        self.call, self.wishes, self.options = call, wishes, options
        self.ids: list[int] = call.answer_N.tolist()
        self.logprobs: list[float] = call.logprobs_N.tolist()
        ended = bool(self.ids) and self.ids[-1] in options.sampling.stop_ids | wishes.stop_ids
        self.spoken_ids = self.ids[:-1] if ended else self.ids
        self.finish_reason = "stop" if call.finished else "length"
        self.name = f"{call.digest & (1 << 64) - 1:016x}-{call.number}"
        self.token_names = list[str]()
        if wishes.logprobs and wishes.names_ids:
            self.token_names = [f"token_id:{token}" for token in self.ids]
        elif wishes.logprobs:
            self.token_names = token_texts(options.tokenizer, self.ids)
        self.versions: list[dict[str, Any]] = []
        newest = str(options.version())
        if call.versions_N is None:
            self.versions.append({"version": newest, "start": 0, "end": len(self.ids)})
        else:
            start = 0
            for version, tokens in groupby(call.versions_N.tolist()):
                end = start + len([*tokens])
                self.versions.append({"version": str(version), "start": start, "end": end})
                start = end
        self.version: str = self.versions[-1]["version"] if self.versions else newest

    @property
    def text(self) -> str:
        """The text before the request's first stop text; the run's own stop texts stay in the answer."""
        text = self.options.tokenizer.text_of(self.spoken_ids)
        return text[: min((text.find(stop) for stop in self.wishes.stop if stop in text), default=len(text))]

    def of_chat(self, message: Message) -> dict[str, Any]:
        calls = message.fields(parsed=False).get("tool_calls", [])
        said: dict[str, Any] = {
            "role": "assistant",
            "content": message.content if message.content or not calls else None,
            **({"tool_calls": calls} if calls else {}),
            "prompt_token_ids": self.call.prompt_P.tolist(),
            "generation_token_ids": self.ids,
            "generation_log_probs": self.logprobs,
            "weight_versions": self.versions,
        }
        reason = "tool_calls" if calls and self.call.finished else self.finish_reason
        shown = None
        if self.wishes.logprobs:
            content, spelt = list[dict[str, Any]](), not self.wishes.names_ids
            for name, one in zip(self.token_names, self.logprobs, strict=True):
                spelling = {"bytes": [*name.encode()] if spelt else None, "top_logprobs": []}
                content.append({"token": name, "logprob": one, **spelling})
            shown = {"content": content}
        return self._whole("chatcmpl", "chat.completion", reason, shown, {"message": said})

    def of_completion(self) -> dict[str, Any]:
        shown = None
        if self.wishes.logprobs:
            names = self.token_names
            shown = {
                "tokens": names,
                "token_logprobs": self.logprobs,
                "text_offset": [*accumulate(map(len, names[:-1]), initial=0)] if names else [],
                "top_logprobs": [{name: one} for name, one in zip(names, self.logprobs, strict=True)],
            }
        return self._whole("cmpl", "text_completion", self.finish_reason, shown, {"text": self.text})

    def of_generation(self) -> dict[str, Any]:
        """Return a response of token ids, with the field names that vLLM and verifiers use."""
        content = list[dict[str, Any]]()
        for token, one in zip(self.ids, self.logprobs, strict=True):
            name = {"token": f"token_id:{token}", "token_id": token}
            content.append({**name, "logprob": one, "bytes": None, "top_logprobs": []})
        choice = {"index": 0, "finish_reason": self.finish_reason, "logprobs": {"content": content}}
        choice |= {"weight_versions": self.versions, "token_ids": self.ids}
        return {"request_id": f"gen-{self.name}", "choices": [choice], "weight_version": self.version}

    def _whole(
        self, prefix: str, kind: str, reason: str, shown: dict[str, Any] | None, said: dict[str, Any]
    ) -> dict[str, Any]:
        asked = self.call.prompt_P.tolist()
        choice = {"index": 0, "finish_reason": reason, "logprobs": shown, "weight_versions": self.versions}
        choice |= ({"token_ids": self.ids} if self.wishes.token_ids else {}) | said
        return {
            "id": f"{prefix}-{self.name}",
            "object": kind,
            "created": int(time.time()),
            "model": self.options.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(asked),
                "completion_tokens": len(self.ids),
                "total_tokens": len(asked) + len(self.ids),
            },
            **({"prompt_token_ids": asked} if self.wishes.token_ids else {}),
        }


def events_of(whole: dict[str, Any], *, include_usage: bool) -> Iterator[bytes]:
    """Yield an answer as a stream: one chunk with the whole answer, a final chunk, and the usage if requested."""
    [choice] = whole["choices"]
    kind = whole["object"]
    base = {key: whole[key] for key in ("id", "created", "model")}
    base["object"] = f"{kind}.chunk" if kind == "chat.completion" else kind
    first, last = dict(choice), {"index": 0, "finish_reason": choice["finish_reason"], "logprobs": None}
    first["finish_reason"] = None
    if "message" in first:
        delta = dict(first.pop("message"))
        delta["content"] = delta["content"] or ""
        if "tool_calls" in delta:
            delta["tool_calls"] = [call | {"index": place} for place, call in enumerate(delta["tool_calls"])]
        first["delta"], last["delta"] = delta, {}
    else:
        last["text"] = ""
    chunks: list[dict[str, Any]] = [{"choices": [first]}, {"choices": [last]}]
    if include_usage:
        chunks.append({"choices": [], "usage": whole["usage"]})
    for chunk in chunks:
        yield b"data: " + to_json(base | chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"


def to_json(value: object) -> bytes:
    """Return JSON for any client: finite numbers, and escapes for characters beyond ASCII."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


class Delivery(Response):
    """A response that counts as delivered once the kernel has accepted all but its last byte.

    The last byte is sent afterwards, so no client can send its next request before the answer counts as delivered.
    within: seconds before a slow client is disconnected. delivered: callback for a delivered response.
    """

    media_type = "application/json"

    def __init__(
        self,
        body: bytes,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
        *,
        within: float = _WITHIN_S,
        delivered: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(body, status, headers, media_type)
        self._within, self._delivered = within, delivered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"][CONNECTION]
        arrived = False
        try:
            async with asyncio.timeout(self._within):
                start = {"type": "http.response.start", "status": self.status_code}
                await send({**start, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": self.body[:-1], "more_body": True})
                arrived = await connection.drained()
        except TimeoutError:
            connection.transport.abort()
        if self._delivered is not None and arrived:
            self._delivered()
        await send({"type": "http.response.body", "body": self.body[-1:], "more_body": False})


def _refused(refusal: RefusedCallError) -> Response:
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    error = {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code}
    return Delivery(to_json({"error": error}), refusal.status, refusal.headers)


def make_app(sessions: Sessions, options: EndpointOptions) -> ASGIApp:
    """Return the ASGI application that exposes these sessions; `server.served` runs it."""

    def no_route(request: Request, error: Exception) -> Response:
        status = cast("HTTPException", error).status_code
        what = f"there is no {request.method} {request.url.path:.200}"
        return _refused(RefusedCallError(what, status=status))

    routes = _Endpoint(sessions, options).routes()
    app = Starlette(routes=routes, exception_handlers={HTTPException: no_route})
    app.router.redirect_slashes = False

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = app
        # Routes and tokens never contain "%", so an escaped path is always wrong.
        if b"%" in scope["raw_path"]:
            answer = _refused(RefusedCallError("no path of this endpoint has an escape in it", status=404))
        elif sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES:
            answer = _refused(RefusedCallError(f"headers may have {HEADER_BYTES} bytes", status=431))
        await answer(scope, receive, send)

    return checked


@dataclass(eq=False)
class _Endpoint:
    """Serves the routes in one asyncio loop; worker threads parse bodies and encode texts."""

    _sessions: Sessions
    _options: EndpointOptions
    _reading: int = field(default=0, init=False)
    """Bytes held by unfinished request bodies."""

    def routes(self) -> list[BaseRoute]:
        posts = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": partial(self._of_ids, generation=False),
            "/inference/v1/generate": partial(self._of_ids, generation=True),
            "/v1/inference/v1/generate": partial(self._of_ids, generation=True),
            "/tokenize": self._tokenize,
            "/v1/tokenize": self._tokenize,
        }
        health = partial(self._about, health=True)
        gets = {"/v1/models": partial(self._about, health=False), "/health": health, "/v1/health": health}
        found: list[BaseRoute] = []
        for prefix in _PREFIXES:
            for method, served in (("POST", posts), ("GET", gets)):
                found += [
                    Route(prefix + path, self._answered(to), methods=[method]) for path, to in served.items()
                ]
        found.append(Route("/sessions/{token}", self._answered(self._state), methods=["GET"]))
        found.append(Route("/sessions/{token}/close", self._answered(self._close), methods=["POST"]))
        return found

    def _answered(self, serve: _Serve) -> _Serve:
        async def endpoint(request: Request) -> Response:
            try:
                return await serve(request)
            except (ClientDisconnect, _ClientGoneError):
                return Response(status_code=499)
            except asyncio.CancelledError:  # the server is stopping
                return _refused(busy("the endpoint stops"))
            except RecursionError:
                return _refused(RefusedCallError("the body is nested too deeply"))
            except Exception as error:  # noqa: BLE001 every failure gets a response
                if (refusal := refusal_of(error)) is None:
                    self._options.failed(error)
                    refusal = RefusedCallError("the endpoint failed", code="internal_error", status=500)
                return _refused(refusal)

        return endpoint

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request)
        session = self._session(request, body)
        session.require_open()
        history = History.of(session)

        def read() -> tuple[Wishes, requests.Chat, ChatPrompt]:
            wishes = requests.wishes_of(body, self._options)
            chat = requests.chat_of(body, session.require_room)
            return wishes, chat, self._prompt(history, chat, session)

        wishes, chat, prompt = await asyncio.to_thread(read)
        call = await self._ask(request, session, prompt.ids, wishes, prompt.heard)
        answer = Answer(call, wishes, self._options)
        said, functions = answer.text, ()
        if chat.tools:
            said, functions = self._options.tool_parser(said, answer.spoken_ids)
        message = Message(ASSISTANT, said, tool_calls=calls_of(call, functions))
        history.keep(prompt, call, message)
        call.flaws.update(flaws_of(message))
        return self._delivery(session, answer, answer.of_chat(message))

    async def _of_ids(self, request: Request, *, generation: bool) -> Response:
        """Answer a prompt of ids; ids after the longest earlier call that it extends count as a new message."""
        body = await self._body(request)
        session = self._session(request, body)
        session.require_open()
        options, room = self._options, session.require_room

        def read() -> tuple[Wishes, list[int], Message]:
            if generation:
                given = body.get("sampling_params")
                if given is not None and not isinstance(given, dict):
                    raise RefusedCallError("sampling_params must be an object", param="sampling_params")
                wishes = requests.wishes_of(body, options, cast("Body", given or {}))
                if wishes.stream:
                    raise RefusedCallError("stream is not supported here", param="stream")
                ids = requests.ids_of(body.get("token_ids"), "token_ids", options, room)
            else:
                wishes, ids = requests.wishes_of(body, options), requests.prompt_of(body, options, room)
            room(len(ids), "")
            known = [len(call.ids) for call in session.calls if ids[: len(call.ids)] == call.ids]
            return wishes, ids, Message("user", options.tokenizer.text_of(ids[max(known, default=0) :]))

        wishes, ids, heard = await asyncio.to_thread(read)
        answer = Answer(await self._ask(request, session, ids, wishes, [heard]), wishes, options)
        whole = answer.of_generation() if generation else answer.of_completion()
        return self._delivery(session, answer, whole)

    def _prompt(self, history: History, chat: requests.Chat, session: Session) -> ChatPrompt:
        try:
            return history.prompt(chat, self._options.tokenizer, session.require_room)
        except (ValueError, TypeError) as error:  # raised by a template or a tokenizer
            what = f"the messages cannot be shown to the model: {error}"
            raise RefusedCallError(what, param="messages") from error

    async def _tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        session = self._session(request, body)

        def read() -> list[int]:
            if "messages" not in body:
                return requests.prompt_of(body, self._options, session.require_room)
            chat = requests.chat_of(body, session.require_room)
            return self._prompt(History.of(session), chat, session).ids

        ids = await asyncio.to_thread(read)
        return Delivery(to_json({"count": len(ids), "max_model_len": self._options.context, "tokens": ids}))

    async def _about(self, request: Request, *, health: bool) -> Response:
        """Return the list of models, or the endpoint's health; a token in the path has to be valid."""
        options = self._options
        if "token" in request.path_params:
            self._session(request, {})
        if health:
            told = {"status": "ok", "weight_version": str(options.version()), "sessions": len(self._sessions)}
            return Delivery(to_json(told | {**options.health()}))
        card = {"id": options.model, "object": "model", "created": 0, "owned_by": "nemo_rl_mcore"}
        card |= {"max_model_len": options.context}
        return Delivery(to_json({"object": "list", "data": [card]}))

    async def _state(self, request: Request) -> Response:
        session = self._session(request, {})
        prompt = session.prompt
        row = {
            "index": prompt.index,
            "text": prompt.text,
            "answer": prompt.answer,
            "messages": [one.fields(parsed=False) for one in prompt.context],
            "tools": [*prompt.tools],
            # Dates and the like become text, NaN and infinities null.
            "columns": json.loads(json.dumps({**prompt.columns}, default=str), parse_constant=lambda _: None),
        }
        state = {"state": "closed" if session.closed.is_set() else "open", "calls": len(session.calls)}
        return Delivery(to_json({**state, "sample": session.sample, "prompt": row}))

    async def _close(self, request: Request) -> Response:
        session = self._session(request, {})
        body = await self._body(request, empty=True)
        given = requests.read_as(requests.Rewards, body)
        session.close(given.reward, given.rewards or {})
        return Delivery(to_json({"state": "closed", "calls": len(session.calls)}))

    def _session(self, request: Request, body: Body) -> Session:
        """Return a request's session; tokens are random and looked up by hash, so timing reveals nothing."""
        closed: ClosedSessionError | None = None
        # Try the most reliable place first: clients fill some of these fields on their own.
        tokens = [request.path_params["token"]] if "token" in request.path_params else list[str]()
        if not tokens:
            if (header := request.headers.get("x-session-id")) is not None:
                tokens.append(header)
            tokens += [token for name in _TOKEN_FIELDS if isinstance(token := body.get(name), str)]
            kind, _, key = request.headers.get("authorization", "").partition(" ")
            if kind.lower() == "bearer":
                tokens.append(key.strip())
        for token in tokens:
            try:
                return self._sessions.get(token)
            except ClosedSessionError as error:
                closed = error
            except UnknownSessionError:
                continue
        raise closed or UnknownSessionError

    async def _body(self, request: Request, *, empty: bool = False) -> Body:
        """Return a request's JSON object; raises RefusedCallError. empty: an empty body is allowed."""
        options, chunks, length = self._options, list[bytes](), 0
        what = f"a body may have {options.body_limit} bytes"
        too_large = RefusedCallError(what, code="body_too_large", status=413)
        if int(request.headers.get("content-length", 0)) > options.body_limit:
            raise too_large
        try:
            async with asyncio.timeout(options.body_seconds):
                async for chunk in request.stream():
                    length += len(chunk)
                    self._reading += len(chunk)
                    if length > options.body_limit:
                        raise too_large
                    if self._reading > options.bodies_limit:
                        what = "too much is being sent at once; ask again"
                        raise RefusedCallError(what, code="try_again", status=503)
                    chunks.append(chunk)
        except TimeoutError as error:
            message = f"the body did not come within {options.body_seconds:g} s"
            raise RefusedCallError(message, status=408) from error
        finally:
            self._reading -= length
        text = b"".join(chunks)
        if empty and not text.strip():
            return {}
        try:
            found = await asyncio.to_thread(parse_json, text)
        except ValueError as error:
            raise RefusedCallError(f"the body is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise RefusedCallError("the body must be an object of JSON")
        return cast("Mapping[str, Any]", found)

    async def _ask(
        self, request: Request, session: Session, ids: list[int], wishes: Wishes, heard: Sequence[Message]
    ) -> Call:
        """Return the session's answer. Raises _ClientGoneError if the client disconnects first."""
        if not ids:
            raise RefusedCallError("the prompt is empty", param="prompt")
        retry = request.headers.get(_RETRY, "0") not in ("", "0")
        asking = asyncio.ensure_future(
            session.ask(
                ids,
                max_tokens=wishes.max_tokens,
                stop=wishes.stop,
                stop_ids=wishes.stop_ids,
                retry=retry,
                heard=heard,
            )
        )

        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        leaving = asyncio.ensure_future(gone())
        try:
            await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = not asking.done()
            asking.cancel()
            leaving.cancel()
            await asyncio.gather(asking, leaving, return_exceptions=True)  # wait for both to end
        if left:
            raise _ClientGoneError
        if asking.cancelled():
            session.require_open()
        return asking.result()

    def _delivery(self, session: Session, answer: Answer, whole: dict[str, Any]) -> Response:
        """Return the response for an answer; its delivery is reported to the session."""
        body, kind = to_json(whole), None
        if answer.wishes.stream:
            body = b"".join(events_of(whole, include_usage=answer.wishes.include_usage))
            kind = "text/event-stream"
        return Delivery(
            body,
            headers={"x-weight-version": answer.version},
            media_type=kind,
            within=self._options.write_seconds,
            delivered=lambda: session.delivered(answer.call),
        )
