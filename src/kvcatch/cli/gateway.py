"""``kvcatch gateway``: an OpenAI-compatible proxy that governs by KV blocks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from kvcatch.errors import KVCatchError, missing_extra

DEFAULT_LISTEN = "127.0.0.1:8900"
#: environment variable with the API key for the engines
KEY_VARIABLE = "KVCATCH_UPSTREAM_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``gateway``."""
    add = parser.add_argument
    add(
        "--upstream", action="append", default=[], metavar="URL",
        help="an engine, e.g. http://127.0.0.1:8000; may be given several times (default: the vLLM of this machine)",
    )  # fmt: skip
    add(
        "--listen", metavar="HOST:PORT", help=f"where to answer (default {DEFAULT_LISTEN}: this machine only)"
    )
    add("--config", metavar="FILE", help="policy file (TOML); options given here win over it")
    add("--check", metavar="FILE", help="check a policy file, print every error with its line, and end")
    add(
        "--explain", metavar="FILE",
        help="say what the running gateway would do with the request body in FILE (- = stdin), and end",
    )  # fmt: skip
    add("--route", default="/v1/chat/completions", help="route of --explain (default /v1/chat/completions)")
    add("--json", action="store_true", help="--check and --explain: one JSON document")
    length = parser.add_argument_group("length of one request")
    length.add_argument("--max-input-tokens", type=_count, metavar="N", help="longest prompt")
    length.add_argument(
        "--over-long", choices=("reject", "drop_turns", "middle_out"),
        help="what happens to a longer one: 413; oldest turns dropped; then also the middle of user text (reject)",
    )  # fmt: skip
    length.add_argument("--max-output-tokens", type=_count, metavar="N", help="cut max_tokens to this")
    length.add_argument(
        "--max-logprobs-tokens", type=_count, metavar="N", help="longest prompt with log probabilities of it"
    )
    classes = parser.add_argument_group("who may hold how much of the pool")
    classes.add_argument(
        "--long-tokens", type=_count, metavar="N",
        help="a prompt above this is long (default: a quarter of the context or a sixteenth of the pool)",
    )  # fmt: skip
    classes.add_argument(
        "--long-share", type=_share, metavar="S", help="of the pool for long requests together, 0 to 1"
    )
    classes.add_argument(
        "--long-concurrency", type=_count, metavar="N", help="long requests at once per engine"
    )
    classes.add_argument(
        "--tenant-share", action="append", default=[], metavar="TENANT=S", type=_tenant_share,
        help="of the pool for one tenant; may be given several times",
    )  # fmt: skip
    classes.add_argument(
        "--mode", choices=("observe", "balanced", "strict"),
        help="admission by peak future blocks: only say what would be held (default), hold by what requests are "
        "expected to generate, or by max_tokens",
    )  # fmt: skip
    classes.add_argument("--max-wait", type=float, metavar="SECONDS", help="longest time held (30)")
    limits = parser.add_argument_group("limits per tenant")
    limits.add_argument("--requests-per-minute", type=_count, metavar="N")
    limits.add_argument("--tokens-per-minute", type=_count, metavar="N", help="prompt and output tokens")
    limits.add_argument(
        "--redis",
        metavar="URL",
        help="share limits and KV ledgers with other gateways, e.g. redis://127.0.0.1:6379/0",
    )
    limits.add_argument(
        "--redis-lost", choices=("local", "closed", "open"),
        help="without Redis: limits divided by --replicas (default), refuse, or let pass",
    )  # fmt: skip
    limits.add_argument("--replicas", type=_count, metavar="N", help="gateways that share the limits (1)")
    tags = parser.add_argument_group("tags")
    tags.add_argument(
        "--isolate-prefix-cache", action="store_true", default=None, help="a cache salt per tenant"
    )
    mirror = parser.add_argument_group("mirror: the same requests on a candidate engine, unseen by clients")
    mirror.add_argument("--mirror", metavar="URL", help="the candidate; gets copies of some requests")
    mirror.add_argument("--mirror-share", type=_share, metavar="S", help="of the requests, 0 to 1 (0.01)")
    mirror.add_argument(
        "--mirror-dir", metavar="FOLDER", help="new folder for the numbers (kvcatch-mirror); no text is kept"
    )
    other = parser.add_argument_group("engines")
    other.add_argument(
        "--feed", action="append", default=[], metavar="TARGET",
        help="where an upstream's state is read, in the order of --upstream: a recorder or a /metrics URL "
        "(default: its recorder when on this machine, else its /metrics)",
    )  # fmt: skip
    other.add_argument(
        "--tokenizer", metavar="FOLDER",
        help="folder with tokenizer.json (default: the model's own when readable, else the engine counts)",
    )  # fmt: skip
    other.add_argument("--upstream-timeout", type=float, metavar="SECONDS", help="without any byte (600)")


def run(args: argparse.Namespace) -> int:
    """Serve until stopped; 0. ``--check``: 2 when the file has errors. Raises KVCatchError."""
    if args.check is not None:
        return _check(args)
    if args.explain is not None:
        return _explain(args)
    try:
        import aiohttp
    except ImportError:
        raise missing_extra("aiohttp", "gateway") from None
    del aiohttp
    from kvcatch.gateway.service import serve

    return serve(
        lambda: _document(args),
        feeds=args.feed,
        config=args.config,
        default_listen=DEFAULT_LISTEN,
        upstream_key=os.environ.get(KEY_VARIABLE) or None,
        verbose=args.verbose,
    )


def _document(args: argparse.Namespace) -> dict[str, Any]:
    """The policy document: the file, with the options on top."""
    from kvcatch.gateway.policy import merge
    from kvcatch.gateway.policyfile import load, problems_of

    document = load(args.config) if args.config else {}
    over: dict[str, Any] = {
        "gateway": {
            "upstreams": args.upstream or None, "listen": args.listen, "mode": args.mode, "max_wait": args.max_wait,
            "isolate_prefix_cache": args.isolate_prefix_cache, "tokenizer": args.tokenizer,
            "upstream_timeout": args.upstream_timeout,
        },
        "length": {
            "max_input_tokens": args.max_input_tokens, "over_long": args.over_long,
            "max_output_tokens": args.max_output_tokens, "max_logprobs_tokens": args.max_logprobs_tokens,
        },
        "long": {"tokens": args.long_tokens, "share": args.long_share, "concurrency": args.long_concurrency},
        "limits": {
            "requests_per_minute": args.requests_per_minute, "tokens_per_minute": args.tokens_per_minute,
        },
        "mirror": {"url": args.mirror, "share": args.mirror_share, "dir": args.mirror_dir},
        "redis": {"url": args.redis, "when_lost": args.redis_lost, "replicas": args.replicas},
        "tenants": {name: {"share": share} for name, share in args.tenant_share},
    }  # fmt: skip
    for name, table in over.items():
        given = {key: value for key, value in table.items() if value is not None}
        if given:
            problems = problems_of({name: given})
            if problems:
                raise KVCatchError("\n".join(f"option: {problem}" for problem in problems) + ".")
            document = merge(document, {name: given})
    return document


def _check(args: argparse.Namespace) -> int:
    from kvcatch.gateway.policy import from_document
    from kvcatch.gateway.policyfile import Problem, check

    try:
        with open(args.check, "rb") as file:
            data = file.read(1 << 20)
    except OSError as error:
        raise KVCatchError(f"{args.check}: {error.strerror or error}.") from None
    document, problems = check(data)
    if not problems:
        try:
            from_document(document)
        except KVCatchError as error:
            problems = [Problem(0, "", str(error))]
    if args.json:
        rows = [
            {"line": row.line or None, "where": row.where or None, "problem": row.text} for row in problems
        ]
        print(json.dumps({"schema_version": 1, "file": args.check, "ok": not rows, "problems": rows}))
    elif problems:
        for problem in problems:
            print(f"{args.check}: {problem}")
    else:
        print(f"{args.check}: fine")
    return 2 if problems else 0


def _explain(args: argparse.Namespace) -> int:
    import msgspec

    from kvcatch import api
    from kvcatch.gateway.admin import call, gateways

    try:
        if args.explain == "-":
            data = sys.stdin.buffer.read(64 << 20)
        else:
            with open(args.explain, "rb") as file:
                data = file.read(64 << 20)
        body = msgspec.json.decode(data)
    except OSError as error:
        raise KVCatchError(f"{args.explain}: {error.strerror or error}.") from None
    except msgspec.DecodeError:
        raise KVCatchError(f"{args.explain}: not JSON.", "Give the body of one request.") from None
    paths = gateways(api.recorder_directory())
    if not paths:
        raise KVCatchError("no gateway runs on this machine as this user.", "Start one: kvcatch gateway")
    answer = call(paths[0], "POST", "/explain", {"route": args.route, "body": body})
    if args.json:
        print(json.dumps({"schema_version": 1, **answer}))
        return 0
    reasons = ", ".join(answer["reasons"]) or "nothing speaks against it"
    print(f"would be {answer['outcome']}: {reasons}")
    if answer.get("message"):
        print(f"  {answer['message']}")
    for name in ("prompt_tokens", "output_tokens", "planned_output_tokens", "long", "tenant"):
        if answer.get(name) is not None:
            print(f"  {name.replace('_', ' ')}: {answer[name]}")
    for name, value in answer.get("changed", {}).items():
        print(f"  {name}: {value}")
    for row in answer.get("engines", ()):
        words = ", ".join(
            f"{key.replace('_', ' ')} {row[key]}" for key in row if key not in ("engine", "reasons")
        )
        print(f"  {row['engine']}: {words}")
    return 0


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:20]) < 1 << 40:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return value


def _tenant_share(text: str) -> tuple[str, float]:
    tenant, _, share = text.rpartition("=")
    if not tenant:
        raise argparse.ArgumentTypeError(f"{text!r} is not TENANT=SHARE")
    return tenant, _share(share)
