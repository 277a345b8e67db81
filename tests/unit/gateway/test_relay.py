"""What passes through: the same bytes, and nothing when either side leaves."""

from __future__ import annotations

import asyncio
import gzip
import hashlib

import aiohttp
import pytest
from aiohttp import web

from .stub import Running, Stub, gateway, plain, until

EVENTS = (
    b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
    b'data: {"choices":[{"index":0,"text":"\xc3\xa9\\n"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7}}\n\n'
    b"data: [DONE]\n\n"
)


def streams(body: bytes, cuts: list[int], **headers: str):
    async def answer(stub: Stub, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await response.prepare(request)
        low = 0
        for cut in [*cuts, len(body)]:
            await response.write(body[low:cut])
            low = cut
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    return answer


async def fetch(running: Running, **body: object) -> tuple[bytes, aiohttp.ClientResponse]:
    document = {"model": "stub", "prompt": "hello", "stream": True, "max_tokens": 8, **body}
    async with running.session.post(running.url + "/v1/completions", json=document) as answer:
        return await answer.read(), answer


def test_a_stream_cut_at_every_byte_arrives_as_it_was_sent_and_is_counted():
    async def scenario() -> None:
        stub = Stub()
        async with gateway(stub) as running:
            for cut in range(1, len(EVENTS)):
                stub.answer = streams(EVENTS, [cut])
                body, _ = await fetch(running)
                assert body == EVENTS
            stub.answer = streams(EVENTS, list(range(1, len(EVENTS))))
            body, answer = await fetch(running)
            assert hashlib.sha256(body).digest() == hashlib.sha256(EVENTS).digest()
            assert answer.headers["Content-Type"] == "text/event-stream"
            (engine,) = running.gate.engines
            await until(lambda: not running.gate.flights, "the last flight to end")
            assert engine.ledger is not None
            assert not engine.ledger.entries
            assert engine.in_flight == 0

    asyncio.run(scenario())


def test_compressed_and_odd_answers_pass_untouched():
    async def scenario() -> None:
        packed = gzip.compress(EVENTS, mtime=0)
        stub = Stub(answer=streams(packed, [3, 10], **{"Content-Encoding": "gzip"}))
        async with gateway(stub) as running:
            body, answer = await fetch(running)
            assert body == packed
            assert answer.headers["Content-Encoding"] == "gzip"

            async def odd(stub: Stub, request: web.Request) -> web.Response:
                return web.Response(
                    status=418,
                    body=b"\x00\xff",
                    headers={"X-Kvcatch-Reason": "forged", "Set-Cookie": "a=b", "X-Own": "1"},
                )

            stub.answer = odd
            body, answer = await fetch(running, stream=False)
            assert (answer.status, body) == (418, b"\x00\xff")
            assert answer.headers["X-Own"] == "1"
            assert "x-kvcatch-reason" not in answer.headers
            assert "Set-Cookie" not in answer.headers

    asyncio.run(scenario())


def test_an_answer_that_breaks_off_does_not_look_whole():
    async def breaks(stub: Stub, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENTS[:50])
        assert request.transport is not None
        request.transport.abort()
        return response

    async def scenario() -> None:
        async with gateway(Stub(answer=breaks)) as running:
            with pytest.raises(aiohttp.ClientError):
                await fetch(running)
            await until(lambda: not running.gate.flights, "the flight to end")
            assert not running.gate.engines[0].ledger.entries

    asyncio.run(scenario())


def test_an_engine_that_breaks_off_before_it_answers_is_a_502_with_a_reason():
    async def drops(stub: Stub, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def scenario() -> None:
        async with gateway(Stub(answer=drops)) as running:
            status, headers, document = await running.post()
            assert (status, headers["x-kvcatch-reason"]) == (502, "upstream")
            assert document["error"]["type"] == "upstream_error"

    asyncio.run(scenario())


def test_a_kept_connection_that_the_engine_closed_costs_the_client_nothing():
    drops = [True]

    async def first_drops(stub: Stub, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        if drops:
            drops.pop()
            request.transport.abort()
        return await plain(stub, request)

    async def scenario() -> None:
        async with gateway(Stub(answer=first_drops)) as running:
            _, answer = await fetch(running, stream=False)
            assert answer.status == 200

    asyncio.run(scenario())


async def waits(stub: Stub, request: web.Request) -> web.StreamResponse:
    """Answers when told; a stream sends its head at once."""
    if (stub.seen[-1][1]).get("stream"):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENTS[:48])
        await stub.go.wait()
        await response.write(EVENTS[48:])
        return response
    await stub.go.wait()
    return web.json_response({"usage": {"prompt_tokens": 5, "completion_tokens": 1}})


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_request_along(stream):
    async def scenario() -> None:
        stub = Stub(answer=waits)
        async with gateway(stub) as running:
            async with aiohttp.ClientSession() as leaving:
                document = {"model": "stub", "prompt": "hello", "stream": stream, "max_tokens": 8}
                task = asyncio.create_task(leaving.post(running.url + "/v1/completions", json=document))
                await until(lambda: stub.running == 1, "the engine to have it")
                assert len(running.gate.engines[0].ledger.entries) == 1
                if stream:
                    (await task).close()
                else:
                    task.cancel()
                await until(lambda: stub.cancelled == 1, "the engine to be told")
            await until(lambda: not running.gate.flights, "the flight to end")
            assert not running.gate.engines[0].ledger.entries

    asyncio.run(scenario())


def test_a_client_that_leaves_the_line_leaves_nothing():
    async def scenario() -> None:
        stub = Stub(answer=waits, blocks=11)  # ten blocks of 16
        async with gateway(stub, gateway={"mode": "strict", "reserve": 0.0}) as running:
            first = asyncio.create_task(running.post(prompt="x" * 80, max_tokens=33))  # 7 blocks
            await until(lambda: stub.running == 1, "the first at the engine")
            async with aiohttp.ClientSession() as leaving:
                document = {"model": "stub", "prompt": "y" * 80, "max_tokens": 33}
                task = asyncio.create_task(leaving.post(running.url + "/v1/completions", json=document))
                await until(lambda: running.gate.door.waiting == 1, "the second in the line")
                task.cancel()
                await until(lambda: running.gate.door.waiting == 0, "the line to be empty")
            assert running.gate.door.queued_tokens == 0
            stub.go.set()
            assert (await first)[0] == 200
            assert stub.most == 1
            await until(lambda: not running.gate.flights, "all flights to end")
            assert not running.gate.engines[0].ledger.entries

    asyncio.run(scenario())


def test_an_engine_that_is_down_is_passed_over():
    async def scenario() -> None:
        up, down = Stub(), Stub()
        async with gateway(down, up) as running:
            running.gate.engines[0].url = "http://127.0.0.1:9"
            running.gate.counters["http://127.0.0.1:9"] = running.gate.counters[running.gate.engines[1].url]
            first = await running.post()
            assert first[0] == 502
            assert int(first[1]["Retry-After"]) >= 1
            assert (await running.post())[0] == 200
            assert len(up.seen) == 1

    asyncio.run(scenario())
