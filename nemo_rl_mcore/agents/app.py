"""The routes of the endpoint: a token finds the session, a body the prompt, and the session draws the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from nemo_rl_mcore.agents import answers, requests
from nemo_rl_mcore.agents.answers import Answer
from nemo_rl_mcore.agents.chat import ChatPrompt, History, message_of
from nemo_rl_mcore.agents.deliveries import Delivery, JsonResponse, RefusedPaths
from nemo_rl_mcore.agents.options import EndpointOptions
from nemo_rl_mcore.agents.refusals import Refusal, RefusedCallError, busy, refusal_of
from nemo_rl_mcore.agents.requests import Body, Wishes
from nemo_rl_mcore.agents.session import (
    Call,
    ClosedSessionError,
    Session,
    Sessions,
    UnknownSessionError,
)
from nemo_rl_mcore.agents.tools import calls_of
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.strict_json import parse_json

_PREFIXES = ("", "/sessions/{token}", "/ng-rollout/{token}")
_TOKEN_FIELDS = ("rollout", "session")
_RETRY = "x-stainless-retry-count"
_WAIT_FOR_BODIES = "too much is being sent at once; ask again"

type _Serve = Callable[[Request], Awaitable[Response]]


class _ClientGoneError(Exception):
    """Nobody waits for the answer."""


def make_app(sessions: Sessions, options: EndpointOptions) -> ASGIApp:
    """Return the endpoint in front of these sessions, as an ASGI application; `server.served` serves it."""
    app = Starlette(
        routes=_Endpoint(sessions, options).routes(), exception_handlers={HTTPException: _of_route}
    )
    app.router.redirect_slashes = False
    return RefusedPaths(app)


def _of_route(request: Request, error: Exception) -> Response:
    status = cast("HTTPException", error).status_code
    return _refused(Refusal(status, f"there is no {request.method} {request.url.path:.200}"))


def _refused(refusal: Refusal) -> Response:
    return JsonResponse(refusal.body, refusal.status, refusal.headers)


class _Endpoint:
    """Serves the routes in one asyncio loop; bodies are read, and texts encoded, in threads beside it."""

    def __init__(self, sessions: Sessions, options: EndpointOptions) -> None:
        self._sessions, self._options = sessions, options
        self._reading = 0
        """Bytes of bodies that are not read to their end."""

    def routes(self) -> list[BaseRoute]:
        """Return all routes, by themselves and below the token of a session."""
        posts = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/inference/v1/generate": self._generation,
            "/v1/inference/v1/generate": self._generation,
            "/tokenize": self._tokenize,
            "/v1/tokenize": self._tokenize,
        }
        gets = {"/v1/models": self._models, "/health": self._health, "/v1/health": self._health}
        found: list[BaseRoute] = []
        for prefix in _PREFIXES:
            found += [
                Route(prefix + path, self._answered(to), methods=["POST"]) for path, to in posts.items()
            ]
            found += [Route(prefix + path, self._answered(to), methods=["GET"]) for path, to in gets.items()]
        found.append(Route("/sessions/{token}", self._answered(self._state), methods=["GET"]))
        found.append(Route("/sessions/{token}/close", self._answered(self._close), methods=["POST"]))
        return found

    def _answered(self, serve: _Serve) -> _Serve:
        """Answer whatever comes of it."""

        async def endpoint(request: Request) -> Response:
            try:
                return await serve(request)
            except (ClientDisconnect, _ClientGoneError):
                return Response(status_code=499)
            except asyncio.CancelledError:  # the server stops
                return _refused(busy("the endpoint stops"))
            except RecursionError:
                return _refused(Refusal(400, "the body is nested too deeply"))
            except Exception as error:  # noqa: BLE001 whatever fails has an answer
                if (refusal := refusal_of(error)) is None:
                    self._options.failed(error)
                    refusal = Refusal(500, "the endpoint failed", code="internal_error")
                return _refused(refusal)

        return endpoint

    async def _chat(self, request: Request) -> Response:
        body, session = await self._opened(request)
        history = History.of(session)

        def read() -> tuple[Wishes, requests.Chat, ChatPrompt]:
            wishes = requests.wishes_of(body, self._options)
            chat = requests.chat_of(body, session.require_room)
            return wishes, chat, self._prompt(history, chat, session)

        wishes, chat, prompt = await asyncio.to_thread(read)
        call = await self._ask(request, session, prompt.ids, wishes, prompt.heard)
        answer = Answer(call, wishes, self._options)
        message = self._message(answer, with_tools=bool(chat.tools))
        history.keep(prompt, call, message)
        return self._delivery(session, answer, answer.of_chat(message))

    async def _opened(self, request: Request) -> tuple[Body, Session]:
        body = await self._body(request)
        session = self._session(request, body)
        session.require_open()
        return body, session

    def _prompt(self, history: History, chat: requests.Chat, session: Session) -> ChatPrompt:
        try:
            return history.prompt(chat, self._options.tokenizer, session.require_room)
        except (ValueError, TypeError) as error:  # of a template or a tokenizer
            raise RefusedCallError(
                f"the messages cannot be shown to the model: {error}", param="messages"
            ) from error

    def _message(self, answer: Answer, *, with_tools: bool) -> Message:
        if not with_tools:
            return message_of(answer.text, ())
        said, functions = self._options.tool_parser(answer.text, answer.spoken_ids)
        return message_of(said, calls_of(answer.call, functions))

    async def _completion(self, request: Request) -> Response:
        body, session = await self._opened(request)

        def read() -> tuple[Wishes, list[int], Message]:
            wishes = requests.wishes_of(body, self._options)
            ids = requests.prompt_of(body, self._options, session.require_room)
            return wishes, ids, self._heard(session, ids)

        wishes, ids, heard = await asyncio.to_thread(read)
        answer = Answer(await self._ask(request, session, ids, wishes, [heard]), wishes, self._options)
        return self._delivery(session, answer, answer.of_completion())

    async def _generation(self, request: Request) -> Response:
        body, session = await self._opened(request)

        def read() -> tuple[Wishes, list[int], Message]:
            wishes = requests.wishes_of(body, self._options, requests.sampling_params_of(body))
            if wishes.stream:
                raise RefusedCallError("stream is not supported here", param="stream")
            ids = requests.token_ids_of(body, self._options, session.require_room)
            return wishes, ids, self._heard(session, ids)

        wishes, ids, heard = await asyncio.to_thread(read)
        answer = Answer(await self._ask(request, session, ids, wishes, [heard]), wishes, self._options)
        return self._delivery(session, answer, answer.of_generation())

    def _heard(self, session: Session, ids: list[int]) -> Message:
        """Return what is new in ids: what stands after the longest prompt and answer that they begin with."""
        session.require_room(len(ids), "")
        known = max((len(call.ids) for call in session.calls if ids[: len(call.ids)] == call.ids), default=0)
        return Message("user", self._options.tokenizer.text_of(ids[known:]))

    async def _tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        session = self._session(request, body)

        def read() -> list[int]:
            if "messages" not in body:
                return requests.prompt_of(body, self._options, session.require_room)
            return self._prompt(
                History.of(session), requests.chat_of(body, session.require_room), session
            ).ids

        return JsonResponse(answers.tokenized(await asyncio.to_thread(read), self._options))

    async def _models(self, request: Request) -> Response:
        self._require_session_of_path(request)
        return JsonResponse(answers.models(self._options))

    async def _health(self, request: Request) -> Response:
        self._require_session_of_path(request)
        version = str(self._options.version())
        told = {"status": "ok", "weight_version": version, "sessions": len(self._sessions)}
        return JsonResponse(told | {**self._options.health()})

    async def _state(self, request: Request) -> Response:
        session = self._session(request, {})
        prompt = session.prompt
        row = {
            "index": prompt.index,
            "text": prompt.text,
            "answer": prompt.answer,
            "messages": [one.fields(parsed=False) for one in prompt.context],
            "tools": [*prompt.extras.tools],
            "columns": answers.plain({**prompt.columns}),
        }
        state = "closed" if session.closed.is_set() else "open"
        return JsonResponse(
            {"state": state, "calls": len(session.calls), "sample": session.sample, "prompt": row}
        )

    async def _close(self, request: Request) -> Response:
        session = self._session(request, {})
        body = await self._body(request, empty=True)
        reward, rewards = requests.rewards_of(body)
        session.close(reward, rewards)
        return JsonResponse({"state": "closed", "calls": len(session.calls)})

    def _require_session_of_path(self, request: Request) -> None:
        if "token" in request.path_params:
            self._session(request, {})

    def _session(self, request: Request, body: Body) -> Session:
        """Return the session that a request is of.

        The tokens are random and looked up by their hashes, so that the time it takes tells nothing of them.
        """
        closed: ClosedSessionError | None = None
        for token in _tokens(request, body):
            try:
                return self._sessions.get(token)
            except ClosedSessionError as error:
                closed = error
            except UnknownSessionError:
                continue
        raise closed or UnknownSessionError("no session has this token", "invalid_session")

    async def _body(self, request: Request, *, empty: bool = False) -> Body:
        """Read a request: an object, or nothing where that is allowed. Raises RefusedCallError."""
        text = await self._read(request)
        if empty and not text.strip():
            return {}
        try:
            found = await asyncio.to_thread(parse_json, text)
        except ValueError as error:
            raise RefusedCallError(f"the body is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise RefusedCallError("the body must be an object of JSON")
        return cast("Mapping[str, Any]", found)

    async def _read(self, request: Request) -> bytes:
        options = self._options
        if int(request.headers.get("content-length", 0)) > options.body_limit:
            raise _too_large(options.body_limit)
        chunks, length = list[bytes](), 0
        try:
            async with asyncio.timeout(options.body_seconds):
                async for chunk in request.stream():
                    length += len(chunk)
                    self._reading += len(chunk)
                    if length > options.body_limit:
                        raise _too_large(options.body_limit)
                    if self._reading > options.bodies_limit:
                        raise RefusedCallError(_WAIT_FOR_BODIES, code="try_again", status=503)
                    chunks.append(chunk)
        except TimeoutError as error:
            message = f"the body did not come within {options.body_seconds:g} s"
            raise RefusedCallError(message, status=408) from error
        finally:
            self._reading -= length
        return b"".join(chunks)

    async def _ask(
        self, request: Request, session: Session, ids: list[int], wishes: Wishes, heard: Sequence[Message]
    ) -> Call:
        """Have the session answer, while the client waits for it. Raises _ClientGoneError when it does not."""
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
        leaving = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = not asking.done()
            await _cancelled(asking, leaving)
        if left:
            raise _ClientGoneError
        if asking.cancelled():
            session.require_open()
        return asking.result()

    def _delivery(self, session: Session, answer: Answer, whole: dict[str, Any]) -> Response:
        """Return what writes an answer, and tells the session once that is done."""
        streamed = answer.wishes.stream
        if streamed:
            body = b"".join(answers.events_of(whole, include_usage=answer.wishes.include_usage))
        else:
            body = answers.to_json(whole)
        return Delivery(
            body,
            "text/event-stream" if streamed else "application/json",
            {"x-weight-version": answer.version},
            within=self._options.write_seconds,
            delivered=lambda: session.delivered(answer.call),
        )


def _tokens(request: Request, body: Body) -> Iterator[str]:
    """Yield what may be the token of a session, the surest first: clients fill some of these places by themselves."""
    if "token" in request.path_params:
        yield request.path_params["token"]
        return
    if (header := request.headers.get("x-session-id")) is not None:
        yield header
    for name in _TOKEN_FIELDS:
        if isinstance(token := body.get(name), str):
            yield token
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        yield key.strip()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Have tasks end now, and wait until they have."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _too_large(limit: int) -> RefusedCallError:
    return RefusedCallError(f"a body may have {limit} bytes", code="body_too_large", status=413)
