"""``kvcatch quality``: does another KV cache change the answers, and which layer loses them?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcatch.quality.corpus import Document
    from kvcatch.quality.verdict import Limits

SCHEMA_VERSION = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``quality``."""
    parser.usage = "%(prog)s --baseline URL|ARGS --candidate URL|ARGS [options] [-- ENGINE COMMAND...]"
    parser.add_argument("--baseline", metavar="URL|ARGS", default="", help="a running server, a command, or flags for the command after --")  # fmt: skip
    parser.add_argument(
        "--candidate", metavar="URL|ARGS", help='the same, for example "--kv-cache-dtype fp8"'
    )
    parser.add_argument("--window", type=int, metavar="TOKENS", help="candidate: the engine itself with a sliding window in every layer")  # fmt: skip
    parser.add_argument("--corpus", metavar="FILE", help="your documents: JSON lines with text, or text split by lines of ---")  # fmt: skip
    size = parser.add_argument_group("how much")
    size.add_argument("--documents", type=int, default=8, metavar="N", help="documents scored (default 8)")
    size.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens of each (default 512)")
    size.add_argument(
        "--generations", type=int, default=4, metavar="N", help="greedy continuations (default 4)"
    )
    size.add_argument("--generate", type=int, default=96, metavar="N", help="tokens of each (default 96)")
    size.add_argument("--tasks", type=int, default=4, metavar="N", help="groups of 17 questions (default 4, 0: none)")  # fmt: skip
    size.add_argument("--seed", type=int, default=0, metavar="N", help="of questions and intervals")
    limits = parser.add_argument_group("what is accepted (the defaults are assumed)")
    limits.add_argument("--max-kl", type=float, metavar="NATS", help="mean KL divergence (0.05)")
    limits.add_argument("--max-flips", type=float, metavar="RATIO", help="top tokens that change (0.15)")
    limits.add_argument("--max-loss", type=float, metavar="RATIO", help="answers lost, net (0.10)")
    limits.add_argument("--baseline-file", metavar="FILE", help="judge against an accepted run instead")
    limits.add_argument("--write-baseline", metavar="FILE", help="keep this run as the accepted one")
    more = parser.add_argument_group("more questions")
    more.add_argument("--capture", metavar="FILE", help="a recording: would a smaller cache help that load at all?")  # fmt: skip
    more.add_argument("--scores", metavar="FILE", help="paired results of your own evaluation: JSON lines with baseline, candidate, tokens")  # fmt: skip
    more.add_argument(
        "--mirror", metavar="FILE", help="pairs.jsonl of a gateway's mirror: the verdict on live requests"
    )
    more.add_argument("--locate", action="store_true", help="which layers lose it: emulated in transformers; needs kvcatch[quality] and an fp8 candidate")  # fmt: skip
    more.add_argument(
        "--evict", metavar="FOLDER", help="judge token eviction on this model instead (no engine)"
    )
    more.add_argument("--prompts", type=int, default=3, metavar="N", help="texts and groups of questions for --evict (default 3)")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="HTML", help="write the answer as one offline page too")
    parser.add_argument("--force", action="store_true", help="overwrite files")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--exit-zero", action="store_true", help="exit 0 whatever the verdict")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return 0 only for a pass. Raises KVCatchError."""
    from kvcatch.errors import KVCatchError

    _check(args)
    document: dict[str, Any] = {}
    lines: list[str] = []
    passed = True
    if args.capture:
        from kvcatch.cli.quality_text import need_lines
        from kvcatch.quality.savings import need

        answer = need(args.capture)
        document["need"] = answer.to_dict()
        lines += need_lines(answer)
    if args.candidate is not None or args.window is not None:
        section, more, good = _regression(args)
        passed = passed and good
        document |= section
        lines += [*([""] if lines else []), *more]
    if args.scores:
        from kvcatch.cli.quality_text import scores_lines
        from kvcatch.quality.scores import judge_scores, read_scores

        judged = judge_scores(read_scores(args.scores), _limits(args))
        document["scores"] = judged.to_dict()
        lines += [*([""] if lines else []), *scores_lines(judged)]
        passed = passed and judged.verdict == "pass"
    if args.mirror:
        from kvcatch.cli.quality_text import shadow_lines
        from kvcatch.quality.shadow import judge_pairs, read_pairs

        shadow = judge_pairs(read_pairs(args.mirror), _limits(args))
        document["mirror"] = shadow.to_dict()
        lines += [*([""] if lines else []), *shadow_lines(shadow)]
        passed = passed and shadow.verdict == "pass"
    if args.evict:
        section, more = _eviction(args)
        document |= section
        lines += [*([""] if lines else []), *more]
    if not document:
        raise KVCatchError(
            "nothing to do.",
            'Give --candidate, for example: --candidate "--kv-cache-dtype fp8" -- vllm serve MODEL',
        )
    from kvcatch import __version__

    whole = {"schema_version": SCHEMA_VERSION, "kvcatch_version": __version__, **document}
    _say("")
    if args.output:
        _page(args.output, whole)
    if args.json:
        print(json.dumps(whole, separators=(",", ":")))
    else:
        print("\n".join(lines))
    return 0 if passed or args.exit_zero else 1


def _check(args: argparse.Namespace) -> None:
    from kvcatch.errors import KVCatchError

    least = {"documents": 1, "tokens": 32, "generations": 0, "generate": 1, "tasks": 0, "seed": 0}
    for name, low in least.items():
        if getattr(args, name) < low:
            raise KVCatchError(f"--{name} {getattr(args, name)}: at least {low}.")
    if args.window is not None and args.window < 1:
        raise KVCatchError(f"--window {args.window}: at least 1.")
    for name in ("max_kl", "max_flips", "max_loss"):
        value = getattr(args, name)
        if value is not None and not value >= 0:
            raise KVCatchError(f"--{name.replace('_', '-')} {value}: not below 0.")
    for path in (args.output, args.write_baseline):
        if path and os.path.exists(path) and not args.force:
            raise KVCatchError(f"{path} exists.", "Overwrite it with --force, or name another.")


def _documents(args: argparse.Namespace) -> list[Document]:
    from kvcatch.quality.corpus import from_file, shipped

    return from_file(args.corpus) if args.corpus else shipped()


def _limits(args: argparse.Namespace) -> Limits:
    from kvcatch.quality.verdict import Limits

    given = {
        name: value
        for name, value in (("kl", args.max_kl), ("flips", args.max_flips), ("loss", args.max_loss))
        if value is not None
    }
    return Limits(**given, source="given" if given else "assumed")


def _regression(args: argparse.Namespace) -> tuple[dict[str, Any], list[str], bool]:
    from kvcatch.cli.demo import use_color
    from kvcatch.cli.quality_text import regression_lines
    from kvcatch.quality import ledger
    from kvcatch.quality.measure import Size
    from kvcatch.quality.run import regress
    from kvcatch.quality.serving import side

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    baseline, candidate = side(args.baseline, command), side(args.candidate or "", command)
    if args.window is not None:
        from kvcatch.quality.savings import windowed

        candidate = windowed(candidate, args.window)
    say = (lambda text: None) if args.quiet else _say
    outcome = regress(
        baseline,
        candidate,
        _documents(args),
        Size(
            documents=args.documents,
            tokens=args.tokens,
            generations=args.generations,
            generated_tokens=args.generate,
            tasks=args.tasks,
            seed=args.seed,
        ),
        _limits(args),
        say,
        ledger.read(args.baseline_file) if args.baseline_file else None,
        args.baseline_file or "",
    )
    if args.write_baseline:
        ledger.write(args.write_baseline, outcome.accepted, force=args.force)
        print(f"Wrote {args.write_baseline}; later: --baseline-file {args.write_baseline}", file=sys.stderr)
    regression = outcome.regression
    lines = regression_lines(regression, color=use_color(args.color))
    document = regression.to_dict()
    if args.locate:
        from kvcatch.cli.quality_text import location_lines
        from kvcatch.quality.blame import blame

        location = blame(outcome, baseline, candidate, say)
        document["location"] = location.to_dict()
        lines += ["", *location_lines(location)]
    return document, lines, regression.quality.verdict == "pass"


def _eviction(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from kvcatch.cli.quality_text import eviction_lines
    from kvcatch.quality.eviction import Reader, cases, judge

    reader = Reader(args.evict)
    follow = max(16, args.tokens // 4)
    made = cases(reader, _documents(args), args.seed, args.tokens - follow, follow, args.prompts)
    name = os.path.basename(os.path.normpath(args.evict))
    answer = judge(reader, made, (lambda text: None) if args.quiet else _say, seed=args.seed, model=name)
    return {"eviction": answer.to_dict()}, eviction_lines(answer)


def _page(path: str, document: dict[str, Any]) -> None:
    from kvcatch.errors import KVCatchError
    from kvcatch.views.html.quality import render

    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(render(document))
    except OSError as error:
        raise KVCatchError(f"cannot write {path}: {error.strerror}.", "Name another file with -o.") from None
    print(f"Wrote {path}; open it in any browser, it loads nothing.", file=sys.stderr)


def _say(text: str) -> None:
    """Progress: one line that overwrites itself, on a terminal only; an empty text takes it away."""
    from kvcatch.views.palette import clean

    if sys.stderr.isatty():
        shown = f"kvcatch: {clean(text)[:100]}" if text else ""
        print(f"\r\x1b[K{shown}", end="", file=sys.stderr, flush=True)
