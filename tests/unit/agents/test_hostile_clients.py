"""Clients that mean no good: refused, within bounds, and nobody else is disturbed."""

import asyncio
import gc
import json
import os
import resource
import socket
import threading
from contextlib import asynccontextmanager, suppress

import psutil
import pytest
from played_endpoint import MODEL, FakeModel, options_for, played, read_reply, request_of

from nemo_rl_mcore.agents.app import make_app
from nemo_rl_mcore.agents.server import HEADER_BYTES, ServerLimits, served, within_descriptors
from nemo_rl_mcore.agents.session import NoRoomError, SessionLimits, Sessions
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.driver.activity import LoopThread

pytestmark = pytest.mark.stage("processes")

USER = {"role": "user", "content": "hi"}
BODY = {"model": MODEL, "messages": [USER]}
CHAT = "/v1/chat/completions"
QUICK = ServerLimits(header_seconds=0.3, idle_seconds=1, stop_seconds=0.5)


async def until_cut(reader):
    """What is read until the other side ends the connection."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


@asynccontextmanager
async def answering_others(endpoint):
    """All the while a session of somebody else is answered at once."""
    session, over = endpoint.open(calls=10_000), asyncio.Event()
    times = []

    async def play():
        loop = asyncio.get_running_loop()
        while not over.is_set():
            start = loop.time()
            assert (await endpoint.chat(session, [USER])).status == 200
            times.append(loop.time() - start)
            await asyncio.sleep(0.01)

    playing = asyncio.create_task(play())
    yield
    over.set()
    await playing
    assert times
    assert max(times) < 5


class Watched:
    """A tokenizer that notes what it encodes, and waits for `going_on` before it does."""

    def __init__(self, tokenizer):
        self.tokenizer, self.encoded, self.in_time = tokenizer, [], []
        self.begun, self.going_on = threading.Event(), threading.Event()
        self.going_on.set()

    def encode(self, text, literal=()):
        self.encoded.append(len(text))
        self.begun.set()
        self.in_time.append(self.going_on.wait(3))
        return self.tokenizer.encode(text, literal)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


LONG = "x" * 10_000
TOO_LONG = [
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": LONG}]}),
    (CHAT, {"messages": [{"role": "user", "content": ""}] * 40}),
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/completions", {"prompt": [5] * 40}),
    ("/inference/v1/generate", {"token_ids": [5] * 40, "sampling_params": {}}),
    ("/tokenize", {"prompt": LONG}),
]


@pytest.mark.parametrize(("path", "body"), TOO_LONG)
async def test_what_is_too_long_by_its_length_alone_is_refused_and_not_encoded(tokenizer, path, body):
    watched = Watched(tokenizer)
    async with played(watched) as endpoint:
        session = endpoint.open(context=40)
        watched.encoded.clear()
        reply, refused = await endpoint.ask("POST", path, body, key=session.token), session.refused
    assert reply.error == (400, None, "context_length_exceeded")
    assert (
        "maximum context length is 40 tokens" in reply.json["error"]["message"]
    )  # words that clients look for
    assert isinstance(refused, NoRoomError)
    assert max(watched.encoded, default=0) < 100


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, BODY), ("/v1/completions", {"prompt": "hi"}), ("/tokenize", {"prompt": "hi"})]
)
async def test_others_are_answered_while_a_text_is_encoded(tokenizer, path, body):
    watched = Watched(tokenizer)
    async with played(watched) as endpoint:
        watched.going_on.clear()
        asking = asyncio.ensure_future(endpoint.ask("POST", path, body, key=endpoint.open().token))
        assert await asyncio.to_thread(watched.begun.wait, 10)
        assert (await endpoint.ask("GET", "/health")).status == 200
        watched.going_on.set()
        assert (await asking).status == 200
    assert all(watched.in_time)


async def test_bodies_beyond_the_limit_are_refused_before_they_are_read(tokenizer):
    async with played(tokenizer, limits=QUICK, body_limit=20_000) as endpoint, answering_others(endpoint):
        session = endpoint.open()
        path = f"/sessions/{session.token}{CHAT}"
        async with endpoint.connected() as (reader, writer):
            head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {10**12}\r\n\r\n"
            writer.write(head.encode())
            declared = await read_reply(reader)
            await until_cut(reader)  # what it does not send is not waited for
        async with endpoint.connected() as (reader, writer):
            writer.write(f"POST {path} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            for _ in range(3):
                writer.write(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
            chunked = await read_reply(reader)
        async with endpoint.connected() as (reader, writer):
            writer.write(request_of("POST", path, b"x" * 30_000))
            long = await read_reply(reader)
            writer.write(request_of("POST", path, BODY))  # the connection goes on behind it
            refused, taken, calls = [declared, chunked, long], await read_reply(reader), session.calls
    assert [reply.error for reply in refused] == [(413, None, "body_too_large")] * 3
    assert (taken.status, len(calls)) == (200, 1)


async def test_all_bodies_together_are_bounded(tokenizer):
    limits = {"body_limit": 100_000, "bodies_limit": 150_000, "body_seconds": 20.0}
    async with played(tokenizer, limits=QUICK, **limits) as endpoint:
        session = endpoint.open()
        request = request_of("POST", CHAT, b"x" * 90_000)
        async with endpoint.connected() as (_, first), endpoint.connected() as (reader, second):
            first.write(request[:-10])
            await first.drain()
            await asyncio.sleep(0.1)
            second.write(request)
            busy = await read_reply(reader)
        await asyncio.sleep(0.1)
        free = await endpoint.chat(session, [USER])
    assert busy.error == (503, None, "try_again")
    assert free.status == 200


async def test_heads_and_bodies_that_come_slowly_are_cut_off(tokenizer):
    async with played(tokenizer, limits=QUICK, body_seconds=0.3) as endpoint, answering_others(endpoint):
        whole = request_of("POST", CHAT, BODY)
        silent, slow_head, slow_body = [], [], []
        async with endpoint.connected() as (reader, _):
            silent = await until_cut(reader)
        async with endpoint.connected() as (reader, writer):
            for byte in whole[:40]:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
                if reader.at_eof():
                    break
            slow_head = await until_cut(reader)
        async with endpoint.connected() as (reader, writer):
            writer.write(whole[:-5])
            slow_body = await read_reply(reader)
        async with endpoint.connected() as (reader, writer):  # between requests, too
            writer.write(request_of("GET", "/health"))
            assert (await read_reply(reader)).status == 200
            writer.write(whole[:10])
            between = await until_cut(reader)
        async with endpoint.connected() as (reader, writer):
            writer.write(request_of("GET", "/health"))
            await read_reply(reader)
            idle = await until_cut(reader)
    assert (silent, slow_head, between, idle) == (b"", b"", b"", b"")
    assert slow_body.error == (408, None, None)


@pytest.mark.parametrize("deaf", [True, False], ids=["deaf", "reads"])
async def test_who_does_not_read_its_answer_is_cut_off_and_the_answer_not_delivered(tokenizer, deaf):
    """Delivered is what makes an equal prompt a new one."""
    long = {"model": MODEL, "prompt": [300] * 100_000, "return_token_ids": True}
    async with played(tokenizer, limits=QUICK, write_seconds=0.3) as endpoint, answering_others(endpoint):
        session = endpoint.open(context=1_000_000)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (endpoint.address.host, endpoint.address.port))
        headers = {"authorization": f"Bearer {session.token}"}
        request = request_of("POST", "/v1/completions", long, headers)
        reader, writer = await asyncio.open_connection(sock=client, limit=4096)
        writer.write(request)
        if deaf:
            await asyncio.sleep(1.5)
        else:
            await reader.readuntil(b"\r\n\r\n")
            while b"]}" not in await reader.read(1 << 16):
                pass
        again = await endpoint.ask("POST", "/v1/completions", long, headers=headers)
        writer.close()
        assert (again.status, [call.repetition for call in session.calls]) == (200, [0] if deaf else [0, 1])


async def test_a_flood_of_headers_is_refused(tokenizer):
    async with played(tokenizer, limits=QUICK) as endpoint, answering_others(endpoint):
        many = {f"x-{i}": "y" * 100 for i in range(HEADER_BYTES // 100)}
        one = {"x-long": "y" * (HEADER_BYTES + 1000)}
        replies = []
        for headers in (many, one):
            replies.append(await endpoint.ask("GET", "/health", headers=headers))
        async with endpoint.connected() as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n")
            for _ in range(2000):
                writer.write(b"x-a: " + b"y" * 200 + b"\r\n")
            with suppress(ConnectionError):
                await writer.drain()
            replies.append(await until_cut(reader))
        many, one, endless = replies
    assert many.status in (400, 431)
    assert one.status in (400, 431)
    assert b"200 OK" not in endless


PATHS = [
    *(
        "/sessions/{t}/../{t}/v1/models",
        "/sessions/../v1/models",
        "//v1/models",
        "/v1//models",
        "/v1/models/",
    ),
    *("/v1/./models", "/v1/%6dodels", "/sessions/{t}%2Fv1/models", "/sessions%2f{t}/v1/models"),
    *("/sessions/{t}/%2e%2e/{t}/close", "/sessions/{t}%00", "/sessions/{t}\\v1\\models"),
    *("/sessions//v1/models", "/sessions", "/v1", "/", "/docs", "/openapi.json", "/etc/passwd"),
    *("http://localhost/v1/models", "*"),
]


async def test_paths_mean_what_they_say(tokenizer):
    async with played(tokenizer, limits=QUICK) as endpoint:
        session = endpoint.open()
        replies = {}
        for path in PATHS:
            asked = path.format(t=session.token)
            replies[path] = [(await endpoint.ask(way, asked)).status for way in ("GET", "POST")]
        closed = session.closed.is_set()
    assert {path: found for path, found in replies.items() if not {*found} <= {400, 401, 404, 405}} == {}
    assert not closed


NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET  / HTTP/1.1\r\nhost: a\r\n\r\n",
    b"POST /v1/models HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    b"POST /v1/models HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/models HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
]


async def test_what_is_no_http_is_refused(tokenizer):
    async with played(tokenizer, limits=QUICK) as endpoint, answering_others(endpoint):
        found = []
        for request in NO_HTTP:
            async with endpoint.connected() as (reader, writer):
                writer.write(request)
                found.append((await until_cut(reader))[:12])
        *refused, upgraded = found
    assert {*refused} <= {b"HTTP/1.1 400", b"HTTP/1.1 404"}
    assert upgraded == b"HTTP/1.1 200"  # as if nothing else had been asked


async def test_forged_tokens_find_nothing(tokenizer):
    async with played(tokenizer, limits=QUICK) as endpoint:
        session = endpoint.open()
        token, ask = session.token, endpoint.ask
        forged = ["", "sk-", token[:-1], f"{token}a", token.swapcase(), f" {token}x", "x" * 5000]
        odd = [None, 5, [token], {"a": token}, True, "é"]
        replies = [await ask("POST", CHAT, {**BODY, "rollout": one}) for one in (*forged, *odd)]
        replies += [await ask("POST", CHAT, BODY, headers={"x-session-id": one}) for one in forged]
        replies += [await ask("POST", CHAT, BODY, key=one) for one in forged]
        found, calls = [reply.status for reply in replies], session.calls
    assert {*found} == {401}
    assert calls == []


async def test_more_connections_than_there_may_be_end_those_that_ask_nothing(tokenizer):
    limits = ServerLimits(connections=20, header_seconds=20, stop_seconds=0.5)
    async with played(tokenizer, limits=limits) as endpoint:
        session, model = endpoint.open(), endpoint.model
        model.answering.clear()
        waiting = asyncio.create_task(endpoint.chat(session, [USER]))
        await model.was_asked(1)
        idle = [
            await asyncio.open_connection(endpoint.address.host, endpoint.address.port) for _ in range(60)
        ]
        await asyncio.sleep(0.1)
        cut = sum([reader.at_eof() or reader.exception() is not None for reader, _ in idle])
        model.answering.set()
        asked = [(await waiting).status, (await endpoint.ask("GET", "/health")).status]
        for _, writer in idle:
            writer.close()
    assert cut == 41
    assert asked == [200, 200]


def test_descriptors_of_the_process_are_left_to_the_rest_of_it():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert within_descriptors(10) == min(10, soft // 2)
    assert within_descriptors(10**9) == soft // 2


async def test_it_listens_on_loopback_alone_and_an_address_in_use_is_an_error(tokenizer):
    async with played(tokenizer) as endpoint:
        with pytest.raises(OSError, match="in use"):
            async with served(make_app(Sessions(), endpoint.options), port=endpoint.address.port):
                pass
        address = endpoint.address
    assert address.host == "127.0.0.1"
    assert address.url == f"http://127.0.0.1:{address.port}"


def test_it_stops_within_seconds_in_the_loop_of_a_thread_with_calls_open(tokenizer):
    """And all that it had is gone: tasks, descriptors."""
    failures, model, sessions = [], FakeModel(tokenizer), Sessions()
    app = make_app(sessions, options_for(tokenizer, failures))
    thread, process = LoopThread("endpoint", failures.append), psutil.Process()
    up, over, left = asyncio.Event(), asyncio.Event(), []

    async def serve():
        before = asyncio.all_tasks()
        async with served(app, limits=ServerLimits(stop_seconds=0.2)) as address:
            left.append((address.host, address.port))
            model.answering.clear()
            up.set()
            await over.wait()
        return asyncio.all_tasks() - before

    async def set_event(event):
        event.set()

    thread.call(asyncio.sleep(0)).result(5)
    descriptors = process.num_fds()
    serving = thread.call(serve())
    thread.call(up.wait()).result(10)
    session = sessions.open(Prompt(1, "a", "b"), 0, SessionLimits(1000, 10), model)
    with socket.create_connection(left[0]) as client, socket.create_connection(left[0]):
        client.sendall(request_of("POST", CHAT, BODY, {"authorization": f"Bearer {session.token}"}))
        thread.call(model.was_asked(1)).result(10)
        thread.call(set_event(over)).result(5)
        tasks = serving.result(5)
        told = client.recv(1 << 16)
    assert b" 503 " in told.split(b"\r\n")[0]
    assert json.loads(told.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "try_again"
    assert (tasks, model.given_up, failures) == (set(), 1, [])
    assert process.num_fds() == descriptors
    thread.close()


async def play_session(endpoint, number):
    """Two calls that go on, and a reward."""
    session = endpoint.open(index=number)
    path = f"/sessions/{session.token}"
    first = await endpoint.chat(session, [USER])
    again = [USER, {"role": "assistant", "content": first.message["content"]}, USER]
    second = await endpoint.chat(session, again)
    assert second.message["prompt_token_ids"][: len(session.calls[0].ids)] == session.calls[0].ids
    assert (await endpoint.ask("POST", f"{path}/close", {"reward": number})).status == 200
    assert session.reward == number
    endpoint.sessions.end(session)


async def leaves_nothing(tokenizer, count, *, megabytes):
    """Play sessions, and compare memory, descriptors and tasks with those after a tenth of them."""
    process = psutil.Process(os.getpid())

    def held():
        gc.collect()
        return process.num_fds(), len(asyncio.all_tasks())

    async with played(tokenizer) as endpoint:
        together, marks = 10, []
        for start in range(0, count, together):
            await asyncio.gather(*(play_session(endpoint, start + i) for i in range(together)))
            endpoint.model.asked.clear()
            if start in (count // 10, count - together):
                await asyncio.sleep(0.1)  # the server's side of the last connections
                marks.append((held(), process.memory_info().rss))
        (before, small), (after, large) = marks
        assert after == before
        assert large - small < megabytes << 20
        assert len(endpoint.sessions) == 0


def test_100_sessions_in_a_row_leave_nothing_behind(tokenizer):
    asyncio.run(asyncio.wait_for(leaves_nothing(tokenizer, 100, megabytes=20), 60))


@pytest.mark.nightly
def test_10000_sessions_in_a_row_leave_nothing_behind(tokenizer):
    """Tokens of ended sessions are remembered, 10,000 at most: about 1 MB."""
    asyncio.run(asyncio.wait_for(leaves_nothing(tokenizer, 10_000, megabytes=20), 3000))
