"""Findings about prefix caching that counters and settings prove: KVC201, KVC205, KVC207 to KVC209.

Where each missed token was lost needs hash chains or a request log: see ``prefix.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvcatch.analysis.evidence import Case, increase
from kvcatch.analysis.layout_facts import drafting, given_back, reuse_unit, state_cache
from kvcatch.analysis.rules import fact, found
from kvcatch.analysis.rules_hybrid import state_pages
from kvcatch.analysis.thresholds import Limits
from kvcatch.results import Finding
from kvcatch.units import human_count, human_ratio


def shorter_than_block(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC201: not one hit, and a block so large that shared beginnings are shorter."""
    unit = reuse_unit(case.info, case.log) or case.block_size
    if not unit or unit < limits.large_block_tokens or case.info.prefix_caching is False:
        return
    queried, hits = _lookups(case)
    if hits is None or hits > 0 or (queried is not None and queried < limits.queried_tokens):
        return
    if queried is None and not _prompts(case):
        return
    method = drafting(case)
    back, state = given_back(case.info, method), state_cache(case)
    least = unit + back
    evidence = [fact(f"the smallest reusable prefix is {human_count(least)} tokens", least, "tokens")]
    if back:
        evidence.append(
            fact(
                f"of them {human_count(back)} that EAGLE and MTP drafts ({method}) compute again",
                back,
                "tokens",
            )
        )
    if state is not None and state.aligned and state.chunk and state.chunk > unit:
        evidence.append(
            fact(f"a state is kept only where a prefill chunk of at most {human_count(state.chunk)} tokens ends",
                 state.chunk, "tokens")
        )  # fmt: skip
    if queried is not None:
        evidence.append(fact(f"0 of {human_count(queried)} tokens looked up were found", 0, "tokens"))
    mean = _mean_prompt(case)
    if mean is not None:
        evidence.append(fact(f"the mean prompt has {human_count(mean)} tokens", mean, "tokens"))
    # A few long prompts that fill the pool with states need not share anything.
    severity = "info" if any(True for _ in state_pages(case, limits)) else "warning"
    yield found(
        "KVC201",
        severity,
        f"no prefix hit: only whole blocks of {human_count(unit)} tokens can be reused",
        *evidence,
    )


def _lookups(case: Case) -> tuple[float | None, float | None]:
    """Tokens looked up and found; (None, 0.0) where only a hit rate of zero is known."""
    if case.series is not None and case.series.steps:
        return case.series.total("queried_tokens"), case.series.total("hit_tokens")
    if case.pages is not None:
        last = case.pages[1]
        return (None if last.queries is None else float(last.queries)), (
            None if last.hits is None else float(last.hits)
        )
    if case.kind == "moment":
        prefix = case.moment.prefix
        return (
            None if prefix.queried_tokens is None else float(prefix.queried_tokens),
            None if prefix.hit_tokens is None else float(prefix.hit_tokens),
        )
    if case.series is not None:
        rate = case.series.get("hit_ratio")
        if rate is not None:
            return None, float(np.nanmax(rate))
    return None, None


def _prompts(case: Case) -> float:
    return (case.series.total("prefill_tokens") or 0.0) if case.series is not None else 0.0


def _mean_prompt(case: Case) -> float | None:
    if case.requests is not None and case.rows is not None and len(case.rows):
        return float(case.requests.prompt_tokens[case.rows].mean())
    sizes = case.pages[1].request_prompt_tokens if case.pages is not None else None
    return sizes.total / sizes.observations if sizes is not None and sizes.observations else None


def caching_off(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC205: caching is off although it was asked for (warning), or simply off with long prompts (note)."""
    asked = None
    if case.log is not None:
        asked = case.log.args.get("enable_prefix_caching")
        effective = case.log.config.get("enable_prefix_caching")
        off = effective == "False"
    else:
        asked = case.info.config.get("asked_prefix_caching")
        off = case.info.prefix_caching is False
    if not off or asked is False:
        return
    evidence = [fact("the effective configuration says enable_prefix_caching=False")]
    if asked:
        evidence.append(fact("it was asked for on the command line"))
    dtype = case.info.kv_cache_dtype or (
        case.log.config.get("kv_cache_dtype") if case.log is not None else None
    )
    usage = case.series.get("usage") if case.series is not None else None
    remedy = ""
    if dtype and "fp8" in dtype:
        evidence.append(fact(f"KV cache in {dtype}, which switches caching off on some models and versions"))
        if usage is not None and float(np.nanmax(usage)) < 0.5:
            remedy = (
                f"Drop --kv-cache-dtype {dtype}: at most {human_ratio(float(np.nanmax(usage)))} of the pool was used, "
                "so it saves nothing here, and caching comes back."
            )
            evidence.append(fact("peak usage of the pool", float(np.nanmax(usage)), "ratio"))
    prompts = _prompts(case)
    if prompts:
        evidence.append(
            fact(f"{human_count(prompts)} prompt tokens were computed without any reuse", prompts, "tokens")
        )
    severity = "warning" if asked else "info"
    yield found(
        "KVC205",
        severity,
        "prefix caching is off" + (" although it was asked for" if asked else ""),
        *evidence,
        remedy=remedy,
    )


def untrustworthy(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC207: counters that cannot be, or that count a lookup more than once."""
    queried, prompts, preempted = (
        increase(case, name) for name in ("queries", "prompt_tokens", "preemptions")
    )
    if queried and prompts and queried > limits.inflated_ratio * prompts:
        yield found(
            "KVC207", "warning", f"{queried / prompts:.1f} times as many tokens looked up as prompted",
            fact(f"{human_count(queried)} tokens looked up", queried, "tokens"),
            fact(f"{human_count(prompts)} prompt tokens", prompts, "tokens"),
            fact("preemptions", preempted, "preemptions"),
            cause="Each failed try to admit a request counts its lookup again (before vLLM 0.31).",
        )  # fmt: skip
    wrong = [
        text for text in case.loss.warnings if "more hits" in text or ("hit" in text and "negative" in text)
    ]
    if wrong:
        yield found(
            "KVC207", "warning", "prefix counters contradict each other", *(fact(text) for text in wrong[:3])
        )
    if case.log is None:
        return
    impossible = [row for row in case.log.external_hits if row[2] < 0 or (row[0] and row[1] > row[0])]
    if impossible:
        total, hit, load = impossible[0]
        yield found(
            "KVC207", "warning", "the connector reports impossible numbers",
            fact(f"{total} tokens, {hit} hit, {load} to load", load, "tokens"),
            cause="A reporting bug of the connector: a negative number of tokens to load.",
            remedy="Do not use its hit rate as evidence; judge by time to first token, and upgrade the connector.",
        )  # fmt: skip
    yield from _preempted_hits(case)


def _preempted_hits(case: Case) -> Iterator[Finding]:
    """Before 0.11 a preempted request's own blocks counted as hits."""
    version = case.info.engine_version
    series = case.series
    if series is None or series.steps:
        return
    rate, waiting, usage = series.get("hit_ratio"), series.get("waiting"), series.get("usage")
    old = version.startswith("0.") and version.split(".")[1].isdigit() and int(version.split(".")[1]) < 11
    if rate is None or waiting is None or usage is None or not old:
        return
    pressed = (waiting > 0) & (usage > 0.8)
    if pressed.any() and float(np.nanmax(rate[pressed])) > 0.2:
        yield found(
            "KVC207", "warning", f"a hit rate of {float(np.nanmax(rate[pressed])):.0%} under pressure in vLLM {version}",
            fact("hit rate", float(np.nanmax(rate[pressed])), "ratio"),
            cause="Until 0.11 a preempted request hit its own blocks, and that was counted.",
        )  # fmt: skip


def seed_mismatch(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC208: the log warns of hashes seeded at random while another process should share them."""
    log = case.log
    if log is None or not log.random_seed:
        return
    hits = sum(row[1] for row in log.external_hits)
    if log.external_hits and hits:
        return
    evidence = [fact("the log says that hashes are used without PYTHONHASHSEED")]
    if log.external_hits:
        evidence.append(
            fact(
                f"0 tokens hit in {human_count(len(log.external_hits))} lookups of the connector", 0, "tokens"
            )
        )
    yield found("KVC208", "warning", "processes hash the same prompt differently", *evidence)


def unit_mismatch(cases: Sequence[Case], limits: Limits) -> Iterator[Finding]:
    """KVC209: engines of one model, or an engine and its connector, cut prompts at different borders."""
    for case in cases:
        chunk = case.log.chunk_size if case.log is not None else None
        if chunk and case.block_size and chunk % case.block_size:
            yield found(
                "KVC209", "warning", f"the connector's chunk of {chunk} tokens is no multiple of the block of {case.block_size}",
                fact("connector chunk", chunk, "tokens"), fact("block size", case.block_size, "tokens"),
            )  # fmt: skip
    sizes: dict[str, dict[int, str]] = {}
    for case in cases:
        if case.info.model and case.block_size:
            sizes.setdefault(case.info.model, {}).setdefault(case.block_size, case.target)
    for model, by_size in sizes.items():
        if len(by_size) > 1:
            yield found(
                "KVC209", "warning", f"engines of {model} use blocks of {' and '.join(map(str, sorted(by_size)))} tokens",
                *(fact(f"{target}: block size {size}", size, "tokens") for size, target in sorted(by_size.items())),
            )  # fmt: skip
