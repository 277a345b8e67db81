"""Which layers and heads lose most, which layer of an engine is broken, which formats and scales would do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvcatch.quality.emulate import (
    Emulator,
    Store,
    everywhere,
    one_head,
    only,
    positions,
    scaled,
    suggested_scales,
)
from kvcatch.quality.endpoint import Position
from kvcatch.quality.formats import ROUNDINGS, bytes_per_value, torch_
from kvcatch.quality.measure import divergences
from kvcatch.quality.stats import bootstrap
from kvcatch.results import Result

#: the emulator's divergence must be within this share of the engine's
TOLERANCE = 0.2
#: and its unquantised model within so many nats of the engine's
SAME_MODEL = 0.002
#: a healthy cache of the same format explains the engine's changes at least so well
HEALTHY = 0.97
#: a fault is named when it leaves less than this share of what the healthy cache and every other fault leave unexplained
_SHARPER = 0.5
#: and explains so much at all
_EXPLAINS = 0.9
#: scale faults that are tried in every layer
_FACTORS = (64.0,)

Documents = Sequence[Sequence[int]]
Scored = Sequence[Sequence[Position]]


class Reproduction(Result, frozen=True):
    """The engine's own divergence beside the emulator's, mean KL in nats."""

    form: str
    engine_kl: float
    emulated_kl: float
    accepted: bool


class LayerLoss(Result, frozen=True):
    """What one layer alone costs, and the scales that fit its values."""

    layer: int
    kl: float
    k_absmax: float
    v_absmax: float
    k_scale: float
    v_scale: float
    heads: tuple[float, ...] = ()  # KL of each KV head alone, for the worst layers


class FormatLoss(Result, frozen=True):
    """What a format would cost: mean KL, flips, and bytes per value with scales."""

    form: str
    kl: float
    low: float
    high: float
    flips: float
    bytes_per_value: float


class Suspect(Result, frozen=True):
    """One possible fault and how well it explains the engine's changes: similarity of the two fingerprints, up to 1."""

    where: str  # healthy | all layers | layer N
    layer: int | None
    factor: float
    similarity: float


class Location(Result, frozen=True):
    """The emulator's answer. ``accepted`` false: it does not reproduce the engine, believe none of the rest."""

    accepted: bool
    baseline_kl: float
    rounding: str  # of fp8, as the engine does it
    reproductions: tuple[Reproduction, ...]
    layers: tuple[LayerLoss, ...] = ()
    formats: tuple[FormatLoss, ...] = ()
    scaled_kl: float | None = None  # with the suggested scales
    suspects: tuple[Suspect, ...] = ()
    broken: str | None = None  # all layers | layer N
    broken_layer: int | None = None
    note: str = ""


class Bench:
    """The documents with the emulator's own unquantised answer."""

    def __init__(self, emulator: Emulator, documents: Documents, k: int) -> None:
        self.emulator, self.documents, self.k = emulator, documents, k
        self.base = [emulator.logprobs(ids) for ids in documents]
        self.base_rows = [positions(one, ids, k) for one, ids in zip(self.base, documents, strict=True)]

    def losses(self, store: Store) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        """(KL, flips) per document and position under another cache."""
        rows = [
            divergences(base, positions(self.emulator.logprobs(ids, store), ids, self.k))
            for base, ids in zip(self.base_rows, self.documents, strict=True)
        ]
        return [kl for kl, _ in rows], [flips for _, flips in rows]

    def kl(self, store: Store) -> float:
        """Mean KL under another cache."""
        return bootstrap(self.losses(store)[0]).value


def mean_kl(a: Scored, b: Scored) -> float:
    """Mean KL over the positions of documents, as far as both go."""
    return bootstrap([divergences(x[: len(y)], y[: len(x)])[0] for x, y in zip(a, b, strict=True)]).value


def locate(
    emulator: Emulator,
    documents: Documents,
    baseline: Scored,
    engines: dict[str, Scored],
    k: int,
    say: Callable[[str], None],
    *,
    formats: Sequence[str] = ("e4m3", "e5m2", "int8", "int4", "nvfp4"),
    worst: int = 3,
) -> Location:
    """Reproduce, then blame.

    Args:
        emulator: the model.
        documents: token ids that the engine scored.
        baseline: the engine's unquantised answer to them.
        engines: format -> the engine's answer with that cache; the last is the candidate in question.
        k: log-probabilities per position.
        say: progress.
        formats: to try.
        worst: layers whose heads are looked at.
    """
    bench = Bench(emulator, documents, k)
    same = mean_kl(baseline, bench.base_rows)
    rounding, reproductions = _reproduce(bench, baseline, engines, say)
    if same > SAME_MODEL:
        return Location(
            accepted=False,
            baseline_kl=same,
            rounding=rounding,
            reproductions=reproductions,
            note="transformers and the engine disagree without any quantisation: another dtype or model?",
        )
    form = list(engines)[-1]
    seen = _changes(baseline, engines[form])
    healthy = _similarity(bench, seen, everywhere(form, 1.0, rounding))
    if healthy < HEALTHY or not all(one.accepted for one in reproductions):
        suspects = accuse(bench, seen, form, rounding, say)
        named = named_fault(suspects)
        what = "no fault that was tried" if named is None else f"a wrong scale in {named.where}"
        return Location(
            accepted=False,
            baseline_kl=same,
            rounding=rounding,
            reproductions=reproductions,
            suspects=tuple(suspects[:5]),
            broken=named.where if named else None,
            broken_layer=named.layer if named else None,
            note=f"the engine does what {form} alone does not; its fingerprint is that of {what}",
        )
    layers = _layers(bench, form, rounding, say, worst)
    tried = []
    for other in formats:
        say(f"format {other}")
        kl, flips = bench.losses(everywhere(other, 1.0, rounding))
        interval = bootstrap(kl)
        tried.append(
            FormatLoss(
                form=other,
                kl=interval.value,
                low=interval.low,
                high=interval.high,
                flips=bootstrap(flips).value,
                bytes_per_value=bytes_per_value(other, emulator.head_size),
            )
        )
    fitted = scaled("e4m3", [one.k_scale for one in layers], [one.v_scale for one in layers], rounding)
    return Location(
        accepted=True,
        baseline_kl=same,
        rounding=rounding,
        reproductions=reproductions,
        layers=tuple(sorted(layers, key=lambda one: -one.kl)),
        formats=tuple(tried),
        scaled_kl=bench.kl(fitted),
    )


def _reproduce(
    bench: Bench, baseline: Scored, engines: dict[str, Scored], say: Callable[[str], None]
) -> tuple[str, tuple[Reproduction, ...]]:
    """The rounding under which the emulator is nearest to the engine, and how near it is for each format."""
    best: tuple[float, str, tuple[Reproduction, ...]] | None = None
    for rounding in ROUNDINGS:
        found, distance = [], 0.0
        for form, scored in engines.items():
            say(f"emulating {form}, rounding {rounding}")
            engine, emulated = mean_kl(baseline, scored), bench.kl(everywhere(form, 1.0, rounding))
            near = abs(emulated - engine) <= TOLERANCE * engine
            found.append(Reproduction(form=form, engine_kl=engine, emulated_kl=emulated, accepted=near))
            distance += abs(math.log(max(emulated, 1e-12) / max(engine, 1e-12)))
        if best is None or distance < best[0]:
            best = (distance, rounding, tuple(found))
    assert best is not None
    return best[1], best[2]


def _layers(
    bench: Bench, form: str, rounding: str, say: Callable[[str], None], worst: int
) -> list[LayerLoss]:
    emulator = bench.emulator
    keys, values = [0.0] * emulator.layers, [0.0] * emulator.layers
    for ids in bench.documents:
        k_seen, v_seen = emulator.extremes(ids)
        keys, values = [max(*pair) for pair in zip(keys, k_seen, strict=True)], [max(*pair) for pair in zip(values, v_seen, strict=True)]  # fmt: skip
    k_scales, v_scales = suggested_scales(keys), suggested_scales(values)
    losses = []
    for layer in range(emulator.layers):
        say(f"layer {layer + 1} of {emulator.layers}")
        losses.append(bench.kl(only(layer, form, rounding=rounding)))
    chosen = sorted(range(emulator.layers), key=lambda at: -losses[at])[:worst]
    heads = {
        layer: tuple(bench.kl(one_head(layer, head, form, rounding)) for head in range(emulator.kv_heads))
        for layer in chosen
    }
    return [
        LayerLoss(
            layer=at, kl=losses[at], k_absmax=keys[at], v_absmax=values[at], k_scale=k_scales[at],
            v_scale=v_scales[at], heads=heads.get(at, ()),
        )
        for at in range(emulator.layers)
    ]  # fmt: skip


#: token -> (weight, change of its log-probability)
Change = dict[int, tuple[float, float]]


def accuse(
    bench: Bench, seen: Sequence[Sequence[Change]], form: str, rounding: str, say: Callable[[str], None]
) -> list[Suspect]:
    """The healthy cache and every fault in turn, by how well each explains what the engine did, best first.

    A fault leaves a fingerprint: which tokens became likelier at which position. The emulator makes the fault in one
    layer after the other, on the first document, and compares.
    """
    first = seen[:1]

    def suspect(where: str, layer: int | None, factor: float, store: Store) -> Suspect:
        say(f"fingerprint: {where}")
        return Suspect(where=where, layer=layer, factor=factor, similarity=_similarity(bench, first, store))

    suspects = [suspect("healthy", None, 1.0, everywhere(form, 1.0, rounding))]
    for factor in _FACTORS:
        suspects.append(suspect("all layers", None, factor, everywhere(form, factor, rounding)))
        suspects += [
            suspect(f"layer {layer}", layer, factor, only(layer, form, factor, form, rounding))
            for layer in range(bench.emulator.layers)
        ]
    return sorted(suspects, key=lambda one: -one.similarity)


def named_fault(suspects: Sequence[Suspect]) -> Suspect | None:
    """The one fault that explains the engine far better than any other and than none; None when there is no such."""
    best, second = suspects[0], suspects[1]
    if best.where == "healthy" or best.similarity < _EXPLAINS:
        return None
    return best if 1 - best.similarity < _SHARPER * (1 - second.similarity) else None


def _changes(baseline: Scored, scored: Scored) -> list[list[Change]]:
    """What became likelier or less likely, among the tokens that both answers name."""
    return [
        [
            {
                token: (math.exp(a.top[token] / 2), b.top[token] - a.top[token])
                for token in a.top.keys() & b.top.keys()
            }
            for a, b in zip(x, y, strict=False)
        ]
        for x, y in zip(baseline, scored, strict=True)
    ]


def _similarity(bench: Bench, seen: Sequence[Sequence[Change]], store: Store) -> float:
    """Cosine between the engine's changes and the emulator's, each token weighted by the root of its probability."""
    torch = torch_()
    dot = mine = theirs = 0.0
    for base, ids, rows in zip(bench.base, bench.documents, seen, strict=False):
        moved = bench.emulator.logprobs(ids, store) - base
        for at, row in enumerate(rows):
            tokens = list(row)
            ours: list[float] = moved[at][torch.tensor(tokens, dtype=torch.long)].tolist() if tokens else []
            for (weight, change), value in zip(row.values(), ours, strict=True):
                dot += weight * change * weight * value
                mine += (weight * value) ** 2
                theirs += (weight * change) ** 2
    return dot / math.sqrt(mine * theirs) if mine and theirs else 0.0
