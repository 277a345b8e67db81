"""``kvcatch plan``: exact KV capacity, whether the peak fits, and what to change."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from kvcatch.errors import KVCatchError
from kvcatch.planner.command import FLAGS, is_command, length, parse_command, size, speculative, whole
from kvcatch.planner.planning import Question, plan_shape
from kvcatch.planner.specs import EngineFlags, Plan

_SIZES = {
    "gpu_memory_bytes": ("--gpu-memory", "memory of one card"),
    "available_kv_bytes": (
        "--available-kv",
        "memory for the KV cache per GPU, as the log says; one per stage with commas",
    ),
    "weights_bytes": ("--weights", "weights per GPU"),
    "activation_bytes": ("--activations", "activation peak per GPU"),
    "cuda_graphs_bytes": ("--cuda-graphs", "CUDA graphs per GPU"),
    "non_torch_bytes": ("--non-torch", "memory outside torch per GPU"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``plan``: vLLM's own flag names, the card, the question."""
    parser.usage = "%(prog)s [options] MODEL... | [options] -- VLLM COMMAND..."
    parser.add_argument(
        "models", nargs="*", metavar="MODEL",
        help="a config.json, a folder, a cached repository or a known name; or, after --, a pasted command",
    )  # fmt: skip
    engine = parser.add_argument_group("the engine (vLLM's names)")
    seen: set[str] = set()
    for flag in FLAGS:
        names = [name for name in flag.names if name not in seen]
        seen.update(names)
        if isinstance(flag.read, bool):
            action = "store_true" if flag.read else "store_false"
            added = engine.add_argument(*names, dest=flag.field, action=action, default=None, help=flag.help)
        else:
            added = engine.add_argument(
                *names, dest=flag.field, default=None, metavar=flag.metavar, help=flag.help
            )
        for name in names:
            # vLLM takes underscores too; they parse here, but would only lengthen the help.
            parser._option_string_actions["--" + name[2:].replace("-", "_")] = added
    engine.add_argument("--speculative-config", metavar="JSON", help="draft module, as vLLM takes it")
    engine.add_argument(
        "--pp-layer-partition", metavar="LIST", help="layers per stage (VLLM_PP_LAYER_PARTITION)"
    )
    engine.add_argument("--engine-version", metavar="X.Y", help="vLLM release (default: 0.32)")
    engine.add_argument(
        "--device", choices=("cuda", "cpu"), default=None, help="where it runs (default cuda)"
    )
    memory = parser.add_argument_group("memory: a card, or any part you know")
    memory.add_argument("--gpu", metavar="NAME", help="a known card, for example H100, L40S or 'RTX 4090'")
    for field, (name, text) in _SIZES.items():
        memory.add_argument(name, dest=field, metavar="SIZE", help=text)
    memory.add_argument(
        "--log", metavar="FILE", help="read an engine's start-up log instead: where its memory went"
    )
    question = parser.add_argument_group(
        "the question (default: max_num_seqs requests of max_model_len tokens)"
    )
    question.add_argument("--concurrency", metavar="N", help="requests at once")
    question.add_argument("--context", metavar="N", help="tokens of one request")
    question.add_argument("--output", metavar="N", help="output tokens on top of the context")
    question.add_argument(
        "--expected-lengths", metavar="TRACE", help="a trace or request log: mean against p99 and peak"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document (a list for several models)")
    parser.add_argument("--csv", action="store_true", help="one CSV row per model")
    parser.add_argument("--list", action="store_true", help="list the known models and cards")
    parser.add_argument("--no-advice", action="store_true", help="only the numbers")
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")


def run(args: argparse.Namespace) -> int:
    """Answer for every model. Returns 1 when a peak does not fit. Raises KVCatchError for bad input."""
    if args.list:
        return _list()
    if args.log:
        return _log(args)
    if not args.models:
        raise KVCatchError(
            "no model.", "Give a config.json, a folder or a known name; see kvcatch plan --list."
        )
    given = _given(args)
    notes: list[str] = []
    models: list[str] = args.models
    if is_command(models):
        model, pasted, notes = parse_command(models)
        models, given = [model], pasted | given
    flags = EngineFlags(**given)
    question = _question(args)
    plans = [_one(model, flags, question, args) for model in models]
    _print(plans, args)
    for note in notes:
        print(f"kvcatch: {note}", file=sys.stderr)
    return 1 if any(plan.peak_fits is False or plan.starts is False for plan in plans) else 0


def _one(model: str, flags: EngineFlags, question: Question, args: argparse.Namespace) -> Plan:
    from kvcatch.planner.configfile import load_config
    from kvcatch.planner.shape import model_shape

    name, config = load_config(model)
    return plan_shape(model_shape(name, config), flags, question, advise=not (args.no_advice or args.csv))


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``EngineFlags`` that were typed."""
    found: dict[str, Any] = {}
    for flag in FLAGS:
        value = getattr(args, flag.field)
        if value is None:
            continue
        if callable(flag.read) and isinstance(value, str):
            try:
                value = flag.read(value)
            except ValueError as error:
                raise KVCatchError(f"{flag.names[0]} is {value!r}.", "Give a number.") from error
        found[flag.field] = value
    for field in _SIZES:
        text = getattr(args, field)
        if text is None:
            continue
        if field == "available_kv_bytes" and "," in text:
            found["available_kv_stages"] = tuple(size(part) for part in text.split(","))
        else:
            found[field] = size(text)
    if args.speculative_config:
        found |= speculative(args.speculative_config)
    if args.pp_layer_partition:
        found["pp_layer_partition"] = tuple(whole(part) for part in args.pp_layer_partition.split(","))
    for name in ("engine_version", "device", "gpu"):
        if getattr(args, name) is not None:
            found[name] = getattr(args, name)
    return found


def _question(args: argparse.Namespace) -> Question:
    lengths: tuple[int, ...] = ()
    if args.expected_lengths:
        from kvcatch.sources.traces import read_workload

        trace = read_workload(args.expected_lengths)
        lengths = tuple(int(total) for total in trace.prompt_tokens + trace.output_tokens)
    return Question(
        concurrency=whole(args.concurrency) if args.concurrency else None,
        context=length(args.context) if args.context else None,
        output=whole(args.output) if args.output else 0,
        lengths=lengths,
    )


def _print(plans: list[Plan], args: argparse.Namespace) -> None:
    from kvcatch.views.plan_text import plan_lines, plans_csv

    if args.csv:
        print(plans_csv(plans), end="")
        return
    if args.json:
        documents = [plan.to_dict() for plan in plans]
        print(json.dumps(documents[0] if len(documents) == 1 else documents, indent=1))
        return
    width = shutil.get_terminal_size((100, 24)).columns
    for number, plan in enumerate(plans):
        print("\n".join([*([""] if number else []), *plan_lines(plan, width, args.ascii)]))


def _log(args: argparse.Namespace) -> int:
    from kvcatch.planner.bootlog import read_boot_log
    from kvcatch.planner.configfile import load_config
    from kvcatch.planner.shape import model_shape

    shape = model_shape(*load_config(args.models[0])) if args.models else None
    report = read_boot_log(Path(args.log), shape)
    if args.json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        print("\n".join(report.lines()))
    return 0


def _list() -> int:
    from kvcatch.planner.catalogue import gpus, model_names

    print("Models: " + ", ".join(model_names()))
    print("Cards: " + ", ".join(card.name for card in gpus()))
    return 0
