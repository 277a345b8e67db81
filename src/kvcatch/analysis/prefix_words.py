"""Lookups of logs whose prompts are known token by token: exact causes, the changing characters, the rewrite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvcatch.analysis.prefix import Divergence, Ints, Lookups, Parts, PrefixReport, Rewrite, explain
from kvcatch.analysis.prefix_log import look_at
from kvcatch.analysis.prefix_reuse import hits_at
from kvcatch.analysis.prefix_text import Comparison, Encode, Index, as_text, estimate, render, rules
from kvcatch.errors import KVCatchError, missing_extra
from kvcatch.workload import build

_IDS = ("prompt_token_ids", "input_ids", "token_ids")


@dataclass(eq=False)
class Words:
    """Prompts as texts and tokens. Of token ids alone the "text" has one character a token."""

    texts: list[str]
    tokens: list[list[int]]
    starts: list[list[int]]  # first character of each token
    ids_only: bool
    note: str
    encode: Encode = estimate


def has_words(record: dict[str, Any]) -> bool:
    """Whether a record holds its prompt as messages, text or token ids."""
    return any(name in record for name in (*_IDS, "messages")) or isinstance(record.get("prompt"), str)


def read_words(records: Sequence[dict[str, Any]], encode: Encode | None, template: Any = None) -> Words:
    """The prompts of the records. Raises KVCatchError for a record without one."""
    texts, tokens, starts = [], [], []
    ids_only = all(any(name in record for name in _IDS) for record in records)
    for number, record in enumerate(records, 1):
        try:
            if ids_only:
                ids = [int(value) for value in next(record[name] for name in _IDS if name in record)]
                text, places = as_text(ids), list(range(len(ids)))
            else:
                text = template(record) if template is not None else render(record)
                ids, places = (encode or estimate)(text)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise KVCatchError(f"request {number}: its prompt cannot be read ({error}).") from None
        if not ids:
            raise KVCatchError(
                f"request {number}: an empty prompt.", "A request needs at least one prompt token."
            )
        texts.append(text)
        tokens.append(ids)
        starts.append(places)
    note = (
        ""
        if ids_only or encode is not None
        else "token counts estimated at 4 characters a token; give --tokenizer"
    )
    return Words(texts, tokens, starts, ids_only, note, encode or estimate)


def tokenizer(path: str | Path) -> tuple[Encode, Any]:
    """(encode, chat template or None) of a tokenizer.json or the folder it is in. Raises KVCatchError."""
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        import tokenizers
    except ImportError:
        raise missing_extra("tokenizers", "gateway") from None
    try:
        model = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 (the library raises plain Exception)
        raise KVCatchError(f"{file}: not a tokenizer ({error}).", "Give a tokenizer.json.") from None

    def encode(text: str) -> tuple[list[int], list[int]]:
        encoded = model.encode(text, add_special_tokens=False)
        return list(encoded.ids), [start for start, _ in encoded.offsets]

    return encode, _template(file.parent)


def _template(folder: Path) -> Any:
    """The chat template of a model folder as a function of a record; None without one."""
    source = folder / "chat_template.jinja"
    try:
        config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        config = {}
    text = source.read_text() if source.exists() else config.get("chat_template")
    if not isinstance(text, str):
        return None
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise missing_extra("jinja2", "gateway") from None
    compiled = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(text)
    special = {
        name: value for name, value in config.items() if name.endswith("_token") and isinstance(value, str)
    }

    def fill(record: dict[str, Any]) -> str:
        if "messages" not in record:
            return render(record)
        return str(
            compiled.render(
                messages=record["messages"], tools=record.get("tools"), add_generation_prompt=True, **special
            )
        )

    return fill


def explain_words(
    records: Sequence[dict[str, Any]],
    words: Words,
    target: str,
    *,
    source: str = "log",
    block_size: int | None = None,
    usable: int | None = None,
    window_seconds: float = 60.0,
    tenant_key: str = "",
    seconds_per_token: float | None = None,
    unit: int | None = None,
    drafts: bool = False,
) -> PrefixReport:
    """The report of a request log whose prompts are known, with changing characters and rewrites.

    Raises KVCatchError when ``unit`` is no multiple of the block.
    """
    index = Index()
    comparisons = [index.compare(text) for text in words.texts]
    look = _lookups(records, words.tokens, block_size, usable, window_seconds, tenant_key)
    look.seconds_per_token = seconds_per_token
    look.limit(unit, drafts)
    look.diverged = _diverged(words, comparisons)
    if words.note:
        look.notes.append(words.note)
    report, parts = explain(look, target, source)
    return msgspec.structs.replace(
        report,
        divergences=_places(words, comparisons, look, parts) or report.divergences,
        rewrites=_rewrites(records, words, comparisons, look, int(parts.hit.sum()))
        if not words.ids_only
        else (),
    )


def _lookups(
    records: Sequence[dict[str, Any]], tokens: Sequence[list[int]], block_size: int | None, usable: int | None,
    window_seconds: float, tenant_key: str,
) -> Lookups:  # fmt: skip
    rows = []
    for number, (record, ids) in enumerate(zip(records, tokens, strict=True)):
        keys = (tenant_key,) if tenant_key else ("tenant", "user")
        rows.append(
            {
                # Records are in order of arrival already.
                "arrival": _arrival(record, number),
                "prompt": len(ids),
                "output": int(record.get("output_tokens") or record.get("max_tokens") or 1),
                "segments": [(value, 1) for value in ids],
                "tenant": next((str(record[key]) for key in keys if key in record), ""),
            }
        )
    workload = build("log", rows, grain=1)
    # Ids of tokens chained to prefixes: content named locally is what this is.
    look = look_at(workload, records, block_size=block_size, usable=usable, window_seconds=window_seconds)
    look.notes = [note for note in look.notes if "chained" not in note]
    return look


def _arrival(record: dict[str, Any], number: int) -> float:
    for name in ("arrival_s", "arrival_time"):
        if isinstance(record.get(name), int | float):
            return float(record[name])
    value = record.get("timestamp")
    return float(value) / 1e3 if isinstance(value, int | float) else float(number)


def _diverged(words: Words, comparisons: Sequence[Comparison]) -> Ints:
    """Tokens of each prompt that the nearest earlier one has too, behind the first difference."""
    result = np.zeros(len(words.texts), np.int64)
    for row, comparison in enumerate(comparisons):
        starts = np.array(words.starts[row])
        for piece in comparison.pieces:
            inside = (starts >= piece.stop) & (starts < piece.stop + piece.same)
            result[row] += int(inside.sum())
    return result


def _places(
    words: Words, comparisons: Sequence[Comparison], look: Lookups, parts: Parts, most: int = 8
) -> tuple[Divergence, ...]:
    """Differences by the text before them: where, what, how often, and the tokens they cost."""
    groups: dict[tuple[int, str], list[int]] = {}
    for row, comparison in enumerate(comparisons):
        if comparison.pieces and parts.by_cause["diverged"][row]:
            piece = comparison.pieces[0]
            groups.setdefault((hash(words.texts[row][: piece.start]), piece.what), []).append(row)
    result = []
    for (_, what), rows in groups.items():
        last = rows[-1]
        comparison = comparisons[last]
        piece = comparison.pieces[0]
        token = int(np.searchsorted(words.starts[last], comparison.shared, side="right")) - 1
        result.append(
            Divergence(
                block=token // look.block_size,
                token=token,
                requests=len(rows),
                lost_tokens=int(parts.by_cause["diverged"][rows].sum()),
                nearest=look.names[comparison.nearest] if comparison.nearest is not None else None,
                example=look.names[last],
                before=None if words.ids_only else piece.before[:120],
                after=None if words.ids_only else piece.after[:120],
                what=None if words.ids_only else what,
                where=f"{'token' if words.ids_only else 'character'} {piece.start}",
            )
        )
    return tuple(sorted(result, key=lambda row: -row.lost_tokens)[:most])


def _rewrites(
    records: Sequence[dict[str, Any]],
    words: Words,
    comparisons: Sequence[Comparison],
    look: Lookups,
    before: int,
) -> tuple[Rewrite, ...]:
    """Each proposed move, run through the same pool as before."""
    result = []
    simulated = (
        int(
            look.reach(
                hits_at(look.workload, look.block_size, look.usable), look.workload.prompt_tokens
            ).sum()
        )
        if look.salt is None and look.engine is None
        else before
    )
    for rule in rules(words.texts, comparisons):
        changed = [rule.apply(text) for text in words.texts]
        count = sum(new != old for new, old in zip(changed, words.texts, strict=True))
        tokens = [_encoded(words, number, new) for number, new in enumerate(changed)]
        again = _lookups(records, tokens, look.block_size, look.usable, look.window_seconds, "")
        found = hits_at(again.workload, look.block_size, look.usable)
        after = int(look.reach(found, again.workload.prompt_tokens).sum())
        won = after - simulated
        if won <= 0:
            continue
        seconds = look.seconds_per_token
        result.append(
            Rewrite(
                what=f"move {rule.what} ({rule.example.strip()[:60]!r}) behind the shared text",
                hit_tokens_before=simulated,
                hit_tokens_after=after,
                won_tokens=won,
                won_blocks=won // look.block_size,
                ttft_seconds_per_request=seconds * won / count if seconds is not None and count else None,
                requests=count,
                example=f"...{rule.head[-40:]}|{rule.tail[:40]}... {rule.example.strip()[:60]}",
            )
        )
    return tuple(sorted(result, key=lambda row: -row.won_tokens))


def _encoded(words: Words, number: int, text: str) -> list[int]:
    if text == words.texts[number]:
        return words.tokens[number]
    return words.encode(text)[0]
