"""What is changed, refused or held at the door, seen from both sides."""

from __future__ import annotations

import asyncio
import hashlib

from .stub import Stub, gateway, until
from .test_relay import waits

KEYS = {"tenant": {"keys": {"sha256:" + hashlib.sha256(b"key-a").hexdigest(): "a", "key-b": "b"}}}


def test_a_key_map_decides_who_it_is_and_nobody_names_himself():
    async def scenario() -> None:
        stub = Stub()
        async with gateway(stub, **KEYS, tenants={"b": {"priority": 3}}) as running:
            for headers in (
                {"Authorization": "Bearer key-a"}, {"Authorization": "Bearer key-b", "x-tenant": "a"}, {"x-tenant": "a"},
            ):  # fmt: skip
                await running.post(headers=headers, vllm_xargs={"kvcatch_tenant": "a", "own": 1})
        tags = [(body["vllm_xargs"].get("kvcatch_tenant"), body.get("priority")) for _, body in stub.seen]
        assert tags == [("a", None), ("b", 3), (None, None)]
        assert all(body["vllm_xargs"]["own"] == 1 for _, body in stub.seen)

    asyncio.run(scenario())


def test_prefixes_are_isolated_by_tenant_when_asked():
    async def scenario() -> None:
        stub = Stub()
        async with gateway(stub, gateway={"isolate_prefix_cache": True}) as running:
            for tenant, salt in (("a", None), ("b", None), ("a", None), ("a", "own"), ("b", "own")):
                await running.post(headers={"x-tenant": tenant}, **({"cache_salt": salt} if salt else {}))
        salts = [body["cache_salt"] for _, body in stub.seen]
        assert salts[0] == salts[2]
        assert len(set(salts)) == 4
        assert "own" not in salts

    asyncio.run(scenario())


def test_lengths_are_cut_capped_and_refused_by_route():
    async def scenario() -> None:
        stub = Stub()
        length = {
            "max_input_tokens": 100, "over_long": "middle_out", "max_output_tokens": 50, "max_logprobs_tokens": 20,
            "routes": {"/v1/completions": {"over_long": "reject"}},
        }  # fmt: skip
        async with gateway(stub, length=length) as running:
            status, headers, _ = await running.post(prompt="x" * 101)
            assert (status, headers["x-kvcatch-reason"]) == (413, "over-long")
            chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "y " * 200}]
            status, headers, _ = await running.post("/v1/chat/completions", messages=chat, max_tokens=500)
            assert status == 200
            body = stub.seen[-1][1]
            sent = "".join(f"<{m['role']}>{m['content']}" for m in body["messages"]) + "<assistant>"
            whole = "".join(f"<{m['role']}>{m['content']}" for m in chat) + "<assistant>"
            assert len(sent) <= 100
            assert int(headers["x-kvcatch-truncated"]) == len(whole) - len(sent)
            assert body["messages"][0] == chat[0]
            assert (body["max_tokens"], headers["x-kvcatch-max-tokens"]) == (50, "50")
            status, headers, _ = await running.post(prompt="z" * 30, prompt_logprobs=1)
            assert (status, headers["x-kvcatch-reason"]) == (413, "prompt-logprobs")
            status, headers, _ = await running.post(prompt="z" * 30, echo=True, logprobs=0)
            assert (status, headers["x-kvcatch-reason"]) == (413, "prompt-logprobs")
            assert (await running.post(prompt="z" * 30, logprobs=1))[0] == 200

    asyncio.run(scenario())


def test_what_never_fits_is_refused_with_numbers():
    async def scenario() -> None:
        async with gateway(Stub(blocks=11)) as running:  # 160 tokens, context 4,096
            assert (await running.post(prompt="x" * 100, max_tokens=61))[0] == 200
            status, _, document = await running.post(prompt="x" * 100, max_tokens=62)
            assert (status, document["error"]["code"]) == (413, "context_length_exceeded")
            assert document["error"]["details"] == {
                "prompt_tokens": 100, "output_tokens": 62, "needed_blocks": 11, "usable_blocks": 10,
            }  # fmt: skip
            # An open end is bounded by the pool.
            status, headers, _ = await running.post(
                "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=None
            )
            assert headers["x-kvcatch-max-tokens"] == str(160 - len("<user>x<assistant>") + 1)

    asyncio.run(scenario())


def test_a_request_held_too_long_gets_the_overload_status_and_a_time():
    async def scenario() -> None:
        stub = Stub(answer=waits, blocks=11)
        table = {"mode": "strict", "reserve": 0, "max_wait": 0.3, "overload_status": 529}
        async with gateway(stub, gateway=table) as running:
            first = asyncio.create_task(running.post(prompt="x" * 100, max_tokens=33))
            await until(lambda: stub.running == 1, "the first at the engine")
            status, headers, document = await running.post(prompt="y" * 100, max_tokens=33)
            assert (status, headers["x-kvcatch-reason"]) == (529, "peak")
            assert int(headers["Retry-After"]) >= 1
            assert document["error"]["code"] == "overloaded"
            stub.go.set()
            assert (await first)[0] == 200

    asyncio.run(scenario())


def test_several_engines_fill_evenly_and_their_models_are_one_list():
    async def scenario() -> None:
        stubs = [Stub(answer=waits), Stub(answer=waits), Stub(answer=waits)]
        async with gateway(*stubs) as running:
            tasks = [asyncio.create_task(running.post(prompt="x" * 50, max_tokens=50)) for _ in range(30)]
            await until(lambda: sum(stub.running for stub in stubs) == 30, "all at the engines")
            assert [stub.running for stub in stubs] == [10, 10, 10]
            async with running.session.get(running.url + "/v1/models") as answer:
                assert [row["id"] for row in (await answer.json())["data"]] == ["stub"]
            for stub in stubs:
                stub.go.set()
            answers = await asyncio.gather(*tasks)
            assert {status for status, _, _ in answers} == {200}
            assert len({headers["x-kvcatch-engine"] for _, headers, _ in answers}) == 3
            status, headers, _ = await running.post(model="other")
            assert (status, headers["x-kvcatch-reason"]) == (404, "model")

    asyncio.run(scenario())
