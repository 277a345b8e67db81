"""``kvcatch VERB``: one table of verbs; each verb's module is imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from typing import NoReturn

from kvcatch.errors import KVCatchError

#: verb -> (module with add_arguments(parser) and run(args) -> int, one line of help)
VERBS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "replay a real trace through the embedded engine and show who holds the cache"),
    "run": ("run", "start an engine with capture on"),
    "ls": ("ls", "list recorders on this machine, alive and dead"),
    "top": ("top", "live view: pool, groups, requests, tenants, cards"),
    "parse": ("parse", "print every record of a capture as JSON lines"),
    "report": ("report", "one offline HTML file: verdict, findings, charts"),
    "plan": ("plan", "exact KV capacity for a model on a GPU"),
    "doctor": ("doctor", "what is wrong, with evidence, cause and remedy"),
    "prefix": ("prefix", "where prefix hits are lost, and what a fix would win"),
    "compare": ("compare", "what differs between two runs beyond noise, and why"),
    "quality": ("quality", "does another KV cache change the answers: verdict with evidence"),
    "simulate": ("simulate", "what if: hit ratio and preemptions for other sizes and policies"),
    "replay": ("replay", "the same arrivals, lengths, prefixes and tags against another engine"),
    "upgrade-check": ("upgrade_check", "replay on the old and the new engine in turn, then compare"),
    "watermark": ("watermark", "the utilisation beyond which latency bends, measured and stored"),
    "serve": ("serve", "Prometheus exporter and headroom API"),
    "gateway": ("gateway", "OpenAI-compatible proxy: length control, exact limits, KV-aware admission"),
    "abort": ("abort", "end one request through the gateway"),
    "hold": ("hold", "refuse a tenant's new requests for a while, through the gateway"),
    "mixin": ("mixin", "write Grafana dashboards, alert rules and the runbook"),
    "vllm-args": ("vllm_args", "print the scheduler and telemetry flags that fit the installed vLLM"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise KVCatchError(message, f'See "{self.prog} --help".')


def _available() -> dict[str, tuple[str, str]]:
    """The verbs whose module is installed."""
    here = os.path.dirname(__file__)
    return {verb: row for verb, row in VERBS.items() if os.path.exists(os.path.join(here, row[0] + ".py"))}


def build_parser(verb: str | None) -> argparse.ArgumentParser:
    """The full parser; only the module of ``verb`` is imported."""
    from kvcatch import __version__

    parser = _Parser(prog="kvcatch", description="Catch, explain and govern the KV cache of LLM engines.")
    parser.add_argument("--version", action="version", version=f"kvcatch {__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (module, summary) in _available().items():
        sub = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        sub.add_argument("-v", action="count", default=0, dest="verbose", help="more detail; -vv: tracebacks")
        if name == verb:
            importlib.import_module(f"kvcatch.cli.{module}").add_arguments(sub)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one verb. Returns the exit status: 0 fine, 1 the check found something, 2 bad usage or input."""
    argv = sys.argv[1:] if argv is None else argv
    verb = next((word for word in argv if not word.startswith("-")), None)
    loud = "-vv" in argv
    try:
        args = build_parser(verb).parse_args(argv)
        code: int = importlib.import_module(f"kvcatch.cli.{VERBS[args.verb][0]}").run(args)
    except KVCatchError as error:
        if loud:
            traceback.print_exc()
        print(f"kvcatch: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our stdout (head, less) has gone: not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
