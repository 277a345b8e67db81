"""The verb against a server of our own making: bad servers, errors, secrets. Good ones are real (tests/engine)."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvcatch.cli.main import main
from kvcatch.quality.savings import checkpoint_scales, windowed
from kvcatch.quality.serving import serving, side
from kvcatch.quality.stats import lower_kl

CANARY = "zebra-canary-7731"
Reply = Callable[[str, dict[str, Any]], tuple[int, Any]]


def answers(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """A tiny language model: one token per character, always expects the same."""
    if path == "/v1/models":
        return 200, {"data": [{"id": "m", "root": "nowhere/m"}]}
    if path == "/version":
        return 200, {"version": "0.32.0"}
    if path == "/tokenize":
        return 200, {"tokens": [ord(one) for one in body["prompt"]]}
    ids = body["prompt"] if isinstance(body["prompt"], list) else [ord(one) for one in body["prompt"]]
    if body.get("prompt_logprobs", 0) > 20:
        return 400, {"error": {"message": f"{CANARY} {body['prompt']}", "param": "prompt_logprobs"}}
    rows: list[Any] = [None]
    rows += [{str(one): {"logprob": -1.0, "rank": 2}, "7": {"logprob": -0.5, "rank": 1}} for one in ids[1:]]
    count = body["max_tokens"]
    step = {"token_id:7": -0.5, "token_id:8": -1.0}
    choice = {
        "text": "7" * count,
        "prompt_logprobs": rows,
        "logprobs": {"tokens": ["token_id:7"] * count, "top_logprobs": [step] * count},
    }
    return 200, {"choices": [choice]}


@pytest.fixture
def serve() -> Iterator[Callable[[Reply], str]]:
    running: list[ThreadingHTTPServer] = []

    def start(reply: Reply) -> str:
        class Handler(BaseHTTPRequestHandler):
            def _do(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                status, body = reply(self.path, json.loads(self.rfile.read(size)) if size else {})
                raw = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST = _do

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


SMALL = ("--documents", "2", "--tokens", "64", "--generations", "1", "--generate", "4", "--tasks", "1")


def test_two_urls_end_to_end_without_a_word_of_the_texts(serve, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f"sk-{CANARY}")
    corpus = tmp_path / "own.txt"
    corpus.write_text(f"{CANARY} " * 40)
    url = serve(answers)
    page, kept = tmp_path / "q.html", tmp_path / "accepted.json"
    words = ["quality", "--baseline", url, "--candidate", url, "--corpus", str(corpus), *SMALL]
    more = ["--write-baseline", str(kept), "-o", str(page), "--json"]
    assert main([*words, *more]) == 1
    out = capsys.readouterr()
    document = json.loads(out.out)
    assert document["schema_version"] == 1
    quality = document["quality"]
    # The little model answers nothing: no power, so no pass, although nothing differs.
    assert quality["verdict"] == "inconclusive"
    assert {one["verdict"] for one in quality["tasks"]} == {"no power"}
    assert quality["logprobs_k"] == 20
    assert quality["checks"][0]["value"] == 0.0
    # The model expects 7 at every position in prefill and while decoding.
    p, q = {7: -0.5}, {7: -0.5, 8: -1.0}
    assert quality["decode_gap"][0][1] == pytest.approx(lower_kl(p, q))
    for text in (out.out, out.err, page.read_text(), kept.read_text()):
        assert CANARY not in text
    assert "://" not in page.read_text().replace(url, "")
    assert main([*words, "--baseline-file", str(kept), "--exit-zero"]) == 0
    assert "inconclusive" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("/v1/models", "lists no model"),
        ("/tokenize", "no list of token ids"),
        ("/v1/completions", "no choices"),
    ],
)
def test_a_server_that_answers_something_else_is_named(serve, capsys, broken, says):
    url = serve(lambda path, body: (200, {}) if path == broken else answers(path, body))
    assert main(["quality", "--baseline", url, "--candidate", url, *SMALL]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("raw", [b"<html>", b"[1]", b"\xff\xfe", b"{" * 5000])
def test_no_json_is_an_error_and_no_traceback(serve, capsys, raw):
    url = serve(lambda path, body: (200, raw))
    assert main(["quality", "--baseline", url, "--candidate", url, *SMALL]) == 2
    assert "not a JSON object" in capsys.readouterr().err


def test_a_refusal_names_the_parameter_and_never_the_prompt(serve, capsys):
    def refuses(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        long = isinstance(body.get("prompt"), list)
        return (400, {"error": {"message": CANARY, "param": "prompt"}}) if long else answers(path, body)

    url = serve(refuses)
    assert main(["quality", "--baseline", url, "--candidate", url, *SMALL]) == 2
    err = capsys.readouterr().err
    assert "HTTP 400 (parameter prompt)" in err
    assert CANARY not in err


def test_sides_that_split_texts_differently_are_refused(serve, capsys):
    def other(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (200, {"tokens": [1] * 200}) if path == "/tokenize" else answers(path, body)

    assert main(["quality", "--baseline", serve(answers), "--candidate", serve(other), *SMALL]) == 2
    assert "different tokens" in capsys.readouterr().err


def test_usage_errors(capsys, tmp_path):
    assert main(["quality"]) == 2
    assert "--candidate" in capsys.readouterr().err
    assert main(["quality", "--candidate", "--kv-cache-dtype fp8"]) == 2
    assert "only flags" in capsys.readouterr().err
    assert main(["quality", "--candidate", "x", "--tokens", "3"]) == 2
    assert "at least 32" in capsys.readouterr().err
    assert main(["quality", "--candidate", "http://127.0.0.1:1", "--baseline", "http://127.0.0.1:1"]) == 2
    assert "Is the server running there?" in capsys.readouterr().err


def test_an_engine_that_ends_at_once_shows_its_last_lines(capsys):
    command = [sys.executable, "-c", "print('no such flag'); raise SystemExit(3)"]
    with pytest.raises(Exception, match="ended with 3"), serving(side("", command)):
        pass
    assert "no such flag" in capsys.readouterr().err


def test_flags_are_added_to_the_command():
    both = side("--kv-cache-dtype fp8", ("vllm", "serve", "m"))
    assert both.command == ("vllm", "serve", "m", "--kv-cache-dtype", "fp8")
    assert side("http://h:1").url == "http://h:1"
    assert side("vllm serve m").command == ("vllm", "serve", "m")


def written(path: Path, by_length: dict[int, tuple[int, int]]) -> str:
    """Scores with (right before, of these lost) per length."""
    rows = [
        {"tokens": length, "baseline": True, "candidate": at >= lost}
        for length, (right, lost) in by_length.items()
        for at in range(right)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_scores_of_an_evaluation_tell_a_growing_loss_from_a_level_one_and_from_chance(tmp_path, capsys):
    # The shape of a public case: 96 % before, after it 92 % of short answers and 74 % of long ones.
    grows = written(tmp_path / "a", {50: (96, 4), 100: (96, 8), 200: (96, 15), 400: (96, 22)})
    assert main(["quality", "--scores", grows, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["scores"]
    assert (found["verdict"], found["lost"]) == ("fail", 49)
    assert [one["name"] for one in found["patterns"]] == ["loss-grows-with-length"]
    level = written(tmp_path / "b", {50: (96, 12), 100: (96, 12), 200: (96, 12), 400: (96, 12)})
    assert main(["quality", "--scores", level, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["scores"]["patterns"] == []
    few = written(tmp_path / "c", {50: (30, 2)})
    assert main(["quality", "--scores", few]) == 1
    out = capsys.readouterr().out
    assert out.startswith("inconclusive")
    assert "not significant" in out
    same = written(tmp_path / "d", {50: (300, 0)})
    assert main(["quality", "--scores", same]) == 0
    (tmp_path / "e").write_text('{"baseline": 0.5}')
    assert main(["quality", "--scores", str(tmp_path / "e")]) == 2
    assert "line 1" in capsys.readouterr().err


def test_a_window_is_the_same_engine_with_every_layer_sliding(tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 3, "model_type": "llama"}')
    found = windowed(side("", ("vllm", "serve", str(tmp_path))), 256)
    assert found.command[:4] == ("vllm", "serve", str(tmp_path), "--hf-overrides")
    overrides = json.loads(found.command[4])
    assert overrides == {"layer_types": ["sliding_attention"] * 3, "sliding_window": 256}
    with pytest.raises(Exception, match="needs the engine's command"):
        windowed(side("http://h:1"), 256)


def test_scales_of_a_checkpoint_are_read_from_its_files(tmp_path: Path):
    import struct

    assert checkpoint_scales(str(tmp_path)) is None
    header = {
        "model.layers.0.self_attn.k_scale": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "model.layers.0.self_attn.v_scale": {"dtype": "F32", "shape": [], "data_offsets": [4, 8]},
        "w": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
    }
    raw = json.dumps(header).encode()
    body = struct.pack("<fff", 0.5, 0.25, 9.0)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + body)
    assert checkpoint_scales(str(tmp_path)) == (0.5, 0.25)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60))
    assert checkpoint_scales(str(tmp_path)) is None


def test_would_a_smaller_cache_help_the_recorded_load(capsys):
    burst = Path(__file__).parents[2] / "data" / "top" / "crash.kvcap"
    assert main(["quality", "--capture", str(burst), "--json"]) == 0
    need = json.loads(capsys.readouterr().out)["need"]
    assert need["helps"] in ("yes", "no")
    assert (need["helps"] == "yes") == (need["bound_by_blocks_ratio"] > 0 or need["preemptions"] > 0)


def test_the_page_shows_layers_and_eviction_loads_nothing_and_escapes_names():
    from kvcatch.views.html.quality import render

    location = {
        "accepted": False, "note": "<b>fingerprint</b>", "suspects": [{"where": "layer 12", "similarity": 0.975}],
    }  # fmt: skip
    trial = {
        "policy": "h2o", "grain": "token", "budget": 0.5, "kl": 0.02, "kv_bytes": 1 << 20, "blocks_freed": 0, "blocks": 4,
    }  # fmt: skip
    advice = {
        "workload": "text",
        "policy": "h2o",
        "budget": 0.5,
        "grain": "token",
        "reason": "KL 0.02 <script>",
    }
    eviction = {
        "model": "m", "trials": [trial], "front": [], "advice": [advice], "prompt_tokens": [96, 384],
    }  # fmt: skip
    page = render({"location": location, "eviction": eviction})
    assert "layer 12" in page
    assert "0.975" in page
    assert "96 to 384 tokens" in page
    assert "<b>fingerprint" not in page
    assert "<script" not in page
    assert "://" not in page
