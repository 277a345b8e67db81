"""The gateway in front of a real engine that would hang: its pool is smaller than the context it takes."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kvcatch
from engine.support import env
from engine.support.gateway import Gateway, Got, gateway, leave, post
from engine.support.mirrors import drive
from engine.support.processes import deadline_poll
from engine.support.server import Server, server
from kvcatch.quality.shadow import read_pairs

# 240 usable blocks of 32 tokens: 7,680 tokens, and a context of 8,192.
BLOCKS, BLOCK, CONTEXT = 241, 32, 8192
POOL = (BLOCKS - 1) * BLOCK
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@dataclass(frozen=True)
class Site:
    """The engine, and a gateway with nothing but defaults."""

    engine: Server
    front: Gateway
    rings: Path
    folder: Path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("gateway")
    rings = folder / "rings"
    arguments = (
        "--num-gpu-blocks-override", str(BLOCKS), "--block-size", str(BLOCK), "--max-model-len", str(CONTEXT),
        "--max-num-seqs", "64", "--max-num-batched-tokens", "2048", "--trust-request-chat-template",
        "--enable-force-include-usage",
    )  # fmt: skip
    with (
        server(
            folder, tiny_model, *arguments, KVCATCH="1", KVCATCH_DIR=str(rings), KVCATCH_TEST_NOCHECK="1",
            VLLM_SERVER_DEV_MODE="1",
        ) as engine,
        gateway(folder, rings, "--upstream", engine.url) as front,
    ):  # fmt: skip
        engine.complete("warm up", 2)
        yield Site(engine, front, rings, folder)


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello there", "max_tokens": 6, "temperature": 0, **more}


def running(site: Site) -> int:
    """By the engine's own record: its page may show a request seconds late, or when it has ended."""
    (ring,) = site.rings.glob("*.core0.kvring")
    capture = kvcatch.open(str(ring))
    count = capture.snapshot().queues.running
    capture.close()
    return count or 0


def waiting(engine: Server) -> int:
    match = re.search(r"^vllm:num_requests_waiting\{[^}]*\} (\S+)", engine.get("/metrics"), re.M)
    assert match
    return int(float(match.group(1)))


def free_again(site: Site) -> bool:
    """Nothing runs, no block is referenced, the gateway holds nothing."""
    state = site.front.state()
    (one,) = state["engines"]
    return running(site) == 0 and not state["requests"] and one["planned_blocks"] == 0


def cli(site: Site, *words: str, data: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [env.PYTHON, "-m", "kvcatch", *words], input=data, capture_output=True, text=True, timeout=60, check=False,
        env=env.environment(KVCATCH_DIR=str(site.rings)),
    )  # fmt: skip


def same(direct: Got, through: Got) -> None:
    """Equal but for the moment of creation, and for where the engine cut a stream into events."""
    assert direct.status == through.status
    assert direct.headers["content-type"] == through.headers["content-type"]
    told = [said(got) for got in (direct, through)]
    assert told[0] == told[1]


def said(got: Got) -> tuple[Any, ...]:
    """(id, model, text, finish reason, usage, how it ends) of a plain or streamed answer."""
    if not got.headers["content-type"].startswith("text/event-stream"):
        return (re.sub(rb'"created":\d+', b"", got.body),)
    assert got.body.endswith(b"data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in got.body.split(b"\n\n")[:-2]]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
    return events[0]["id"], events[0]["model"], text, choices[-1]["finish_reason"], events[-1].get("usage")


def test_it_knows_the_pool_from_the_recorder_and_counts_by_itself(site: Site) -> None:
    (one,) = site.front.state()["engines"]
    assert (one["usable_blocks"], one["source"], one["local_tokenizer"]) == (BLOCKS - 1, "recorder", True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_answers_are_the_engines_own(site: Site, route: str, stream: bool) -> None:
    body = ask(stream=stream)
    if route == CHAT:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    headers = {"X-Request-Id": f"same-{route[-4:]}-{stream}"}
    same(post(site.engine.url + route, body, headers), site.front.post(route, body, headers))


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
# A template that shows roles, tools and arguments, so that a wrong count cannot agree by accident.
SHOWS = (
    "{{ bos_token }}{% if tools %}{% for t in tools %}[{{ t | tojson }}]{% endfor %}{% endif %}{% for m in messages %}"
    "<{{ m.role }}>{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}{% if extra is defined %}{{ extra }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
AGENT = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
    {"role": "user", "content": "and?"},
]
COUNTS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (COMPLETIONS, {"prompt": "hello there"}),
    "odd text": (COMPLETIONS, {"prompt": "tab\there, Ünïcode 🙂 and </s> inside"}),
    "ids": (COMPLETIONS, {"prompt": [5, 6, 7, 8]}),
    "several": (COMPLETIONS, {"prompt": ["one", "three"]}),
    "no special": (COMPLETIONS, {"prompt": "hello", "add_special_tokens": False}),
    "chat": (CHAT, {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": " hi  "}]}),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}),
    "tools": (CHAT, {"messages": AGENT, "tools": [TOOL], "tool_choice": "none", "chat_template": SHOWS}),
    "arguments": (CHAT, {"messages": AGENT[:1], "chat_template": SHOWS, "chat_template_kwargs": {"extra": "more"}}),
    "no generation prompt": (CHAT, {"messages": AGENT[:1], "chat_template": SHOWS, "add_generation_prompt": False}),
    "response": (RESPONSES, {"input": "hello", "instructions": "be brief"}),
    "response items": (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]}),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_prompt_tokens_equal_the_engines_usage(site: Site, name: str) -> None:
    route, more = COUNTS[name]
    body = {"model": "tiny", "temperature": 0, **more}
    body["max_output_tokens" if route == RESPONSES else "max_tokens"] = 4
    answer = site.front.post(route, body)
    assert answer.status == 200, answer.body
    usage = answer.json["usage"]
    assert site.front.counted(route, body) == usage.get("prompt_tokens", usage.get("input_tokens"))


def test_what_the_engine_would_hang_on_is_refused(site: Site) -> None:
    # Without the gateway the request waits for ever: nothing runs, nothing is used.
    connection = http.client.HTTPConnection("127.0.0.1", site.engine.port, timeout=60)
    connection.request(
        "POST", COMPLETIONS, json.dumps(ask(prompt="x" * (POOL + 20))), {"Content-Type": "application/json"}
    )
    deadline_poll(lambda: waiting(site.engine) == 1, 30, "the request in the engine's queue")
    assert running(site) == 0
    connection.close()
    deadline_poll(lambda: waiting(site.engine) == 0, 30, "the engine to let go of it")
    refused = site.front.post(COMPLETIONS, ask(prompt="x" * (POOL + 20)))
    assert (refused.status, refused.reason) == (413, "never-fits")
    details = refused.json["error"]["details"]
    assert details["usable_blocks"] == BLOCKS - 1 < details["needed_blocks"]
    # A prompt that fits, with an output that does not.
    refused = site.front.post(COMPLETIONS, ask(prompt="x" * (POOL - 100), max_tokens=200))
    assert (refused.status, refused.reason) == (413, "never-fits")
    refused = site.front.post(COMPLETIONS, ask(prompt="x" * CONTEXT))
    assert (refused.status, refused.reason) == (413, "context-length")


def test_what_just_fits_runs_and_one_token_more_is_refused(site: Site) -> None:
    # The last generated token needs no slot: prompt + output - 1 tokens in 240 blocks.
    prompt = "x" * (POOL - 9)  # and one for the beginning of the text
    tokens = site.front.counted(COMPLETIONS, ask(prompt=prompt))
    assert tokens <= POOL
    most = POOL - tokens + 1
    assert site.front.post(COMPLETIONS, ask(prompt=prompt, max_tokens=most, ignore_eos=True)).status == 200
    assert site.front.post(COMPLETIONS, ask(prompt=prompt, max_tokens=most + 1)).reason == "never-fits"


def test_an_open_end_is_cut_to_the_pool(site: Site) -> None:
    prompt = "x" * (POOL - 40)
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "ignore_eos": True,
    }
    tokens = site.front.counted(CHAT, {**body, "max_tokens": 1})
    answer = site.front.post(CHAT, body)
    assert answer.status == 200
    assert int(answer.headers["x-kvcatch-max-tokens"]) == POOL - tokens + 1
    assert answer.json["usage"]["completion_tokens"] == POOL - tokens + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_engine_and_slot(site: Site, stream: bool) -> None:
    leave(
        site.front.url,
        {"prompt": "hello", "max_tokens": 7500, "ignore_eos": True, "stream": stream},
        lambda: running(site) == 1,
    )
    deadline_poll(lambda: free_again(site), 30, "engine and gateway free again")


def test_operators_abort_and_hold(site: Site) -> None:
    body = ask(max_tokens=7500, ignore_eos=True)  # all that the pool holds: it is aborted long before
    with concurrent.futures.ThreadPoolExecutor() as pool:
        future = pool.submit(
            site.front.post, COMPLETIONS, body, {"X-Request-Id": "the-hog", "x-tenant": "team"}
        )
        deadline_poll(lambda: running(site) == 1, 30, "the request at the engine")
        done = cli(site, "abort", "the-hog")
        assert (done.returncode, done.stdout) == (0, "aborted the-hog (relaying, tenant team)\n"), done.stderr
        assert (future.result().status, future.result().reason) == (409, "aborted")
    deadline_poll(lambda: free_again(site), 30, "engine and gateway free again")
    done = cli(site, "abort", "the-hog")
    assert done.returncode == 2
    assert "no such request" in done.stderr

    assert cli(site, "hold", "team", "--for", "5m").returncode == 0
    held = site.front.post(COMPLETIONS, ask(), {"x-tenant": "team"})
    assert (held.status, held.reason) == (429, "tenant-hold")
    assert 1 <= int(held.headers["retry-after"]) <= 60
    assert site.front.post(COMPLETIONS, ask(), {"x-tenant": "other"}).status == 200
    assert cli(site, "hold", "team", "--for", "0").returncode == 0
    assert site.front.post(COMPLETIONS, ask(), {"x-tenant": "team"}).status == 200


def test_tags_reach_the_recorder_and_nothing_else_does(site: Site) -> None:
    site.front.post(
        COMPLETIONS, ask(user="alice@example.com"), {"X-Request-Id": "tagged", "x-tenant": "billing"}
    )
    (ring,) = site.rings.glob("*.core0.kvring")

    def seen() -> list[Any]:
        capture = kvcatch.open(str(ring))
        found = [view for view in capture.requests() if view.request_id == "tagged"]
        capture.close()
        return found

    (view,) = deadline_poll(seen, 20, "the request in the record")
    assert view.tags["tenant"] == "billing"
    assert re.fullmatch(r"u:[0-9a-f]{16}", view.tags["user"])
    assert b"alice" not in ring.read_bytes()
    assert "alice" not in site.front.text


FAMILIES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama3": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "mistral": "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% elif m.role == 'user' %}[INST] {{ ns.system }}{% set ns.system = '' %}"
    "{{ m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
}  # fmt: skip


@pytest.fixture(scope="module")
def cutting(site: Site) -> Iterator[Gateway]:
    arguments = ("--upstream", site.engine.url, "--max-input-tokens", "600", "--over-long", "middle_out")
    with gateway(site.folder, site.rings, *arguments) as running:
        yield running


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shortened_chat_has_exactly_the_tokens_the_engine_counts(
    site: Site, cutting: Gateway, family: str
) -> None:
    messages = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "first " * 40},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "second " * 400},
    ]
    body = {
        "model": "tiny",
        "messages": messages,
        "max_tokens": 2,
        "temperature": 0,
        "chat_template": FAMILIES[family],
    }
    whole = site.front.counted(CHAT, body)
    answer = cutting.post(CHAT, body)
    assert answer.status == 200, answer.body
    tokens = answer.json["usage"]["prompt_tokens"]
    assert tokens <= 600 < whole
    assert int(answer.headers["x-kvcatch-truncated"]) == whole - tokens
    assert 600 - tokens < 60


def test_without_the_recorder_its_page_and_tokenizer_are_enough(site: Site, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    arguments = ("--upstream", site.engine.url, "--tokenizer", str(tmp_path))
    with gateway(tmp_path, nowhere, *arguments) as blind:
        (one,) = blind.state()["engines"]
        assert (one["source"], one["usable_blocks"], one["local_tokenizer"]) == ("metrics", BLOCKS - 1, False)
        body = ask(prompt="x" * (POOL + 20))
        assert blind.post(COMPLETIONS, body).reason == "never-fits"
        answer = blind.post(COMPLETIONS, ask())
        assert blind.counted(COMPLETIONS, ask()) == answer.json["usage"]["prompt_tokens"]


def test_strict_admission_lets_nobody_be_preempted(site: Site) -> None:
    """Demand of three pools at once: the stock engine preempts, behind the gateway nobody is."""

    def preemptions() -> float:
        match = re.search(r"^vllm:num_preemptions_total\{[^}]*\} (\S+)", site.engine.get("/metrics"), re.M)
        return float(match.group(1)) if match else 0.0

    def load(url: str, label: str) -> list[int]:
        # 7 prompt and 25 output blocks each: 32 of 240, 24 at once need 768.
        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            bodies = [
                ask(prompt=f"{label}{n:03d} " + "p" * 200, max_tokens=800, ignore_eos=True) for n in range(24)
            ]
            return [got.status for got in pool.map(lambda body: post(url + COMPLETIONS, body), bodies)]

    before = preemptions()
    assert set(load(site.engine.url, "direct")) == {200}
    assert preemptions() > before
    with gateway(
        site.folder, site.rings, "--upstream", site.engine.url, "--mode", "strict", "--max-wait", "300"
    ) as front:
        before = preemptions()
        most = [0]
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.05):
                most[0] = max(most[0], front.state()["waiting"])

        watcher = threading.Thread(target=watch)
        watcher.start()
        statuses = load(front.url, "door")
        stop.set()
        watcher.join()
        assert set(statuses) == {200}
        assert preemptions() == before
        assert most[0]  # seven fit in 228 blocks at once, more where their peaks lie apart


def test_a_long_class_of_one_holds_the_second(site: Site) -> None:
    arguments = (
        "--upstream", site.engine.url, "--long-tokens", "1000", "--long-concurrency", "1", "--long-share", "0.9",
    )  # fmt: skip
    with gateway(site.folder, site.rings, *arguments) as front:
        # 204 of the 216 blocks that the class may hold: it runs until it is aborted below.
        body = ask(prompt="L" * 1500, max_tokens=5000, ignore_eos=True)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            first = pool.submit(front.post, COMPLETIONS, body, {"X-Request-Id": "the-first"})
            deadline_poll(lambda: running(site) == 1, 30, "the first at the engine")
            second = pool.submit(front.post, COMPLETIONS, {**body, "prompt": "M" * 1500, "max_tokens": 50})
            deadline_poll(lambda: front.state()["waiting"] == 1, 30, "the second in the line")
            told = cli(site, "gateway", "--explain", "-", "--route", COMPLETIONS, data=json.dumps(body))
            assert front.post(COMPLETIONS, ask()).status == 200  # short requests pass
            assert not second.done()
            assert cli(site, "abort", "the-first").returncode == 0
            assert (first.result().status, second.result().status) == (409, 200)
        assert told.stdout.startswith("would be held: long-concurrency")
        refused = front.post(COMPLETIONS, ask(prompt="L" * 7000))
        assert (refused.status, refused.reason) == (413, "long-share")


def test_the_admin_socket_is_private(site: Site) -> None:
    path = site.rings / f"gateway-{site.front.port}.sock"
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_mirror_of_an_engine_onto_itself_sees_no_difference(site: Site, tmp_path: Path) -> None:
    bodies = [ask(prompt=f"number {number} of the copies", max_tokens=4) for number in range(12)]
    direct = [site.engine.post(COMPLETIONS, body)["choices"] for body in bodies]
    done = drive(tmp_path, site.rings, site.engine.url, site.engine.url, bodies)
    assert done.choices == direct
    assert "mirror stopped" not in done.log
    pairs = read_pairs(str(done.results / "pairs.jsonl"))
    assert len(pairs) >= 6  # a look at the pool may find it busy now and then
    assert {(one.kl_nats, one.flips_ratio, one.first_divergence) for one in pairs} == {(0.0, 0.0, None)}
    kept = b"".join(path.read_bytes() for path in done.results.iterdir())
    assert b"copies" not in kept
    deadline_poll(lambda: free_again(site), 20, "an empty engine")
