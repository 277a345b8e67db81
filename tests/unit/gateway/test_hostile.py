"""Untrusted input: framing, sizes, shapes, secrets."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kvcatch.gateway.body import CHAT, COMPLETIONS, ROUTES, Ask, parse
from kvcatch.gateway.refusal import Refusal

from .stub import Stub, gateway

BODY = b'{"model":"stub","prompt":"hi","max_tokens":2}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


def framed(head: bytes, body: bytes = BODY) -> bytes:
    return HEAD + head + b"\r\n" + body


CASES = {
    "two lengths": framed(b"Content-Length: 45\r\nContent-Length: 44\r\n"),
    "two equal lengths": framed(b"Content-Length: 45\r\nContent-Length: 45\r\n"),
    "length and chunks": framed(b"Content-Length: 45\r\nTransfer-Encoding: chunked\r\n", b"2d\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "odd coding": framed(b"Transfer-Encoding: xchunked\r\n"),
    "chunked twice": framed(b"Transfer-Encoding: chunked, chunked\r\n", b"2d\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "signed length": framed(b"Content-Length: +45\r\n"),
    "hex length": framed(b"Content-Length: 0x2d\r\n"),
    "bad chunk": framed(b"Transfer-Encoding: chunked\r\n", b"zz\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "space before colon": framed(b"Content-Length : 45\r\n"),
    "folded header": framed(b"X-A: 1\r\n b\r\nContent-Length: 45\r\n"),
    "null in header": framed(b"X-A: a\x00b\r\nContent-Length: 45\r\n"),
    "huge header": framed(b"X-A: " + b"a" * 40_000 + b"\r\nContent-Length: 45\r\n"),
    "bare newline": HEAD.replace(b"\r\n", b"\n") + b"Content-Length: 45\n\n" + BODY,
    "compressed": framed(b"Content-Encoding: gzip\r\nContent-Length: 45\r\n"),
    "not utf-8": framed(b"Content-Length: 45\r\n", BODY.replace(b"hi", b"\xff\xfe")),
    "NaN": framed(b"Content-Length: 46\r\n", b'{"model":"stub","prompt":"h","temperature":NaN}'[:46]),
    "deep": framed(b"Content-Length: 20000\r\n", b"[" * 20000),
    "deep but closed": framed(b"Content-Length: 20005\r\n", b'{"a":' + b"[" * 10000 + b"]" * 10000),
    "a list": framed(b"Content-Length: 2\r\n", b"[]"),
    "no model text": framed(b"Content-Length: 24\r\n", b'{"model":1,"prompt":"a"}'),
    "negative output": framed(b"Content-Length: 46\r\n", b'{"model":"stub","prompt":"h","max_tokens": -1} '),
    "not http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "too many words": b"POST /v1/completions extra HTTP/1.1\r\n\r\n",
}  # fmt: skip


async def raw(port: int, data: bytes, whole: bool = False) -> tuple[int, bytes]:
    """(status, everything) of raw bytes; 0 when the connection just ends. whole: nothing more is to come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    if not whole:
        writer.write_eof()
    try:
        async with asyncio.timeout(10):
            answer = await reader.read()
    except ConnectionResetError:
        answer = b""
    writer.close()
    return (int(answer.split(b" ")[1]) if answer.startswith(b"HTTP/") else 0), answer


def test_smuggling_and_malformed_input_is_a_4xx_and_never_reaches_the_engine():
    async def scenario() -> None:
        stub = Stub()
        async with gateway(stub) as running:
            for name, data in CASES.items():
                status, answer = await raw(running.port, data)
                assert status == 0 or 400 <= status < 500, (name, answer[:300])
                assert answer.count(b"HTTP/1.") <= 1, name
            assert stub.seen == []
            # What is well framed passes.
            status, _ = await raw(
                running.port, framed(b"Content-Length: 45\r\nConnection: close\r\n"), whole=True
            )
            assert status == 200
            chunks = b"5\r\n" + BODY[:5] + b"\r\n28\r\n" + BODY[5:] + b"\r\n0\r\n\r\n"
            status, _ = await raw(
                running.port, framed(b"Transfer-Encoding: chunked\r\nConnection: close\r\n", chunks), True
            )
            assert status == 200
            assert len(stub.seen) == 2

    asyncio.run(scenario())


def test_bodies_above_the_cap_are_refused_whether_announced_or_not():
    async def scenario() -> None:
        stub = Stub()
        async with gateway(stub, gateway={"max_body_bytes": 2000}) as running:
            large = json.dumps({"model": "stub", "prompt": "x" * 3000}).encode()
            for data in (large, _slowly(large)):
                async with running.session.post(running.url + "/v1/completions", data=data) as answer:
                    assert answer.status == 413
                    assert (await answer.json())["error"]["code"] == "request_too_large"
            assert stub.seen == []

    asyncio.run(scenario())


async def _slowly(data: bytes):
    for low in range(0, len(data), 100):
        yield data[low : low + 100]


def parsed(route: str, data: bytes) -> Ask | None:
    """The request, None when it was refused as malformed; anything else fails the test."""
    try:
        return parse(route, data)
    except Refusal as refusal:
        if refusal.status != 400:
            raise
        return None


@given(st.binary(max_size=200), st.sampled_from(ROUTES))
def test_any_bytes_parse_or_are_refused(data, route):
    assert parsed(route, data) is None or isinstance(parsed(route, data), Ask)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("model", "prompt", "messages", "input", "max_tokens", "max_completion_tokens", "stream", "n", "vllm_xargs", "echo", "logprobs", "prompt_logprobs", "max_output_tokens", "instructions"), values),
    ),
    st.sampled_from(ROUTES),
)  # fmt: skip
def test_any_document_parses_or_is_refused_and_what_parses_encodes_again(document, route):
    ask = parsed(route, json.dumps(document).encode())
    if ask is None:
        return
    again = parse(route, ask.encode())
    assert (again.output_tokens, again.choices, again.prompts) == (
        ask.output_tokens,
        ask.choices,
        ask.prompts,
    )


def test_a_key_given_twice_has_one_meaning_for_gateway_and_engine():
    ask = parse(COMPLETIONS, b'{"model":"m","prompt":"a","max_tokens":9000,"max_tokens":5}')
    assert ask.output_tokens == 5
    assert json.loads(ask.encode())["max_tokens"] == 5
    assert ask.encode().count(b"max_tokens") == 1


def test_the_engine_limits_output_by_the_newer_name_when_both_are_there():
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 7,
        "max_completion_tokens": 9,
    }
    ask = parse(CHAT, json.dumps(body).encode())
    assert ask.output_tokens == 9
    ask.set_output(4)
    assert (ask.document["max_tokens"], ask.document["max_completion_tokens"]) == (4, 4)


CANARY = "CANARY-7f3a"


def test_secrets_of_a_request_appear_nowhere_but_where_they_belong(caplog: pytest.LogCaptureFixture):
    async def echoes(stub: Stub, request: web.Request) -> web.Response:
        return web.json_response({"usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    async def scenario() -> None:
        stub = Stub(answer=echoes)
        logging.getLogger("kvcatch.gateway").propagate = True
        async with gateway(
            stub, upstream_key="the-engines-own", tenant={"keys": {"known": "team"}}
        ) as running:
            headers = {
                "Authorization": f"Bearer {CANARY}-key", "Cookie": f"session={CANARY}-cookie", "x-api-key": CANARY,
                "x-user": f"{CANARY}-user", "x-kvcatch-tenant": CANARY, "Proxy-Authorization": CANARY,
                "Connection": "keep-alive, x-hop", "x-hop": CANARY, "X-Request-Id": f"kvc~team~{CANARY}~1",
                "x-tenant": f"{CANARY}-claimed", "X-Forwarded-For": CANARY,
            }  # fmt: skip
            secret = {"prompt": f"{CANARY} text", "user": f"{CANARY}-user2"}
            assert (await running.post(headers=headers, **secret))[0] == 200
            seen_headers, seen_body = stub.seen[0]
            flat = json.dumps(seen_headers)
            assert seen_headers["Authorization"] == "Bearer the-engines-own"
            assert CANARY not in flat
            assert CANARY not in json.dumps({k: v for k, v in seen_body.items() if k != "prompt"})
            assert seen_body["prompt"] == f"{CANARY} text"
            # Refused, failing, broken: nothing of it in answers, metrics or logs.
            texts = []
            for more in ({"max_tokens": 1 << 30}, {"model": CANARY}, {"stream": CANARY}, {"prompt": {"a": CANARY}},
                         {"vllm_xargs": CANARY}, {"n": CANARY}):  # fmt: skip
                status, got, document = await running.post(headers=headers, **(secret | more))
                assert 400 <= status < 500
                texts += [json.dumps(document), json.dumps(dict(got))]
            running.gate.door.enter = None
            status, got, document = await running.post(headers=headers, **secret)
            assert (status, document["error"]["code"]) == (500, "internal")
            texts += [json.dumps(document), json.dumps(dict(got))]
            await raw(running.port, framed(b"X-A: " + CANARY.encode() + b"\x00\r\n"))
            async with running.session.get(running.url + "/metrics") as answer:
                texts.append(await answer.text())
            for text in texts:
                assert CANARY not in text
            assert CANARY not in caplog.text

    caplog.set_level(logging.DEBUG)
    asyncio.run(scenario())
