"""KV cache groups as vLLM forms them, pipeline stages included.

Source: ``get_kv_cache_groups`` and what it calls in ``v1/core/kv_cache_utils.py`` (0.12, 0.24, 0.31, 0.32; since
0.33 in ``v1/core/kv_cache_planning.py``), ``get_pp_indices`` in ``distributed/utils.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.planner.engine import Era
from kvcatch.planner.pages import LayerSpec
from kvcatch.planner.specs import CHUNKED, CROSS, FULL, MAMBA, MLA, RING, SLIDING


class Group(msgspec.Struct, frozen=True):
    """Layers that share one block table. ``uniform`` = pages of different sizes side by side in one block."""

    specs: tuple[LayerSpec, ...]
    uniform: bool = False

    @property
    def first(self) -> LayerSpec:
        """The layer that stands for the group."""
        return self.specs[0]


def form_groups(specs: list[LayerSpec], era: Era, packed: bool) -> list[Group]:
    """All groups of the model, in engine order. Raises KVCatchError when the engine cannot lay the model out.

    ``packed``: block-outermost layout, where groups of different widths share a block (DeepSeek V4).
    """
    if not specs:
        return []
    if not era.hybrid_groups or _mergeable(specs):
        return [Group(tuple(specs), uniform=len({spec.page_bytes for spec in specs}) > 1)]
    if _one_type(specs):
        return [Group(tuple(specs), uniform=True)]
    if packed and len({spec.page_bytes for spec in specs}) > 1:
        return _packed(specs)
    return _equal_groups(_equal_pages(specs, era), era)


def _mergeable(specs: list[LayerSpec]) -> bool:
    """One spec for all: the same cell, full attention with or without a window."""
    return len({spec.identity for spec in specs}) == 1 and len({spec.block_size for spec in specs}) == 1


def _one_type(specs: list[LayerSpec]) -> bool:
    """All layers always need the same token slots (``UniformTypeKVCacheSpecs.is_uniform_type``)."""
    if len({spec.block_size for spec in specs}) > 1:
        return False
    kinds = {spec.kind for spec in specs}
    if kinds <= {FULL, MLA}:
        return True
    if kinds in ({SLIDING}, {CHUNKED}):
        return len({spec.window for spec in specs}) == 1
    if kinds == {MAMBA}:
        return len({spec.page_bytes for spec in specs}) == 1
    return kinds in ({CROSS}, {RING})


def _equal_pages(specs: list[LayerSpec], era: Era) -> list[LayerSpec]:
    """Raise block sizes, or pad, until all pages are equal (``unify_kv_cache_spec_page_size``)."""
    largest = max(spec.page_bytes for spec in specs)
    result = []
    for spec in specs:
        if spec.page_bytes == largest:
            result.append(spec)
        elif spec.kind != MAMBA and largest % spec.page_bytes == 0:
            ratio = largest // spec.page_bytes
            result.append(
                msgspec.structs.replace(
                    spec, block_size=spec.block_size * ratio, page_bytes=largest, split=ratio
                )
            )
        elif era.pads_pages and spec.kind != MLA:
            result.append(msgspec.structs.replace(spec, page_bytes=largest, padded_from=spec.page_bytes))
        else:
            raise KVCatchError(
                f"layer {spec.index}: a page of {spec.page_bytes} bytes does not divide the largest, {largest}.",
                "This engine version refuses such a model; a newer one pads the page.",
            )
    return result


def _equal_groups(specs: list[LayerSpec], era: Era) -> list[Group]:
    """Deal the layers of each class into groups of one size (``_get_kv_cache_groups_uniform_page_size``)."""
    buckets: dict[tuple[object, ...], list[LayerSpec]] = {}
    for spec in specs:
        buckets.setdefault((*spec.identity, spec.block_size), []).append(spec)
    sizes = [len(bucket) for bucket in buckets.values()]
    size = max(sizes) if max(sizes) < min(sizes) * era.group_slack else min(sizes)
    groups = []
    for bucket in buckets.values():
        number = math.ceil(len(bucket) / size)
        groups += [Group(tuple(bucket[start::number])) for start in range(number)]
    return groups


def _packed(specs: list[LayerSpec]) -> list[Group]:
    """Groups of a block-outermost layout (``_get_packed_kv_cache_groups`` of 0.32)."""
    buckets: list[list[LayerSpec]] = []
    for spec in specs:
        bucket = next((each for each in buckets if _one_type([*each, spec])), None)
        if bucket is None:
            buckets.append([spec])
        else:
            bucket.append(spec)
    counted = [(bucket, Counter(spec.page_bytes for spec in bucket)) for bucket in buckets]
    balanced = [len(set(counter.values())) == 1 for _, counter in counted]
    repeats = [max(counter.values()) for _, counter in counted]
    floor = max(
        (n for n, (_, c), even in zip(repeats, counted, balanced, strict=True) if even and len(c) > 1),
        default=0,
    )
    unit = (
        _least_padding([n for n, even in zip(repeats, balanced, strict=True) if even], floor)
        if floor
        else None
    )
    numbers = [math.ceil(n / unit) if even and unit else 1 for n, even in zip(repeats, balanced, strict=True)]
    is_state = [
        bucket[0].kind in (MAMBA, RING) or (unit is None and bucket[0].kind == SLIDING) for bucket in buckets
    ]
    anchor = max(
        _widest(counter, len(bucket) if state else number)
        for (bucket, counter), state, number in zip(counted, is_state, numbers, strict=True)
    )
    groups: list[Group] = []
    for (bucket, counter), state, number in zip(counted, is_state, numbers, strict=True):
        if state:
            number = max(number, math.ceil(len(bucket) / max(anchor // bucket[0].page_bytes, 1)))
        if number == 1:
            groups.append(Group(tuple(bucket), uniform=True))
            continue
        columns = [[spec for spec in bucket if spec.page_bytes == page] for page in counter]
        rows = list(zip(*columns, strict=True))
        groups += [
            Group(tuple(spec for row in rows[start::number] for spec in row), uniform=True)
            for start in range(number)
        ]
    return groups


def _widest(counter: Counter[int], number: int) -> int:
    """Bytes of the largest of ``number`` groups a bucket splits into."""
    return sum(math.ceil(count / number) * page for page, count in counter.items())


def _least_padding(values: list[int], least: int) -> int:
    """The group length from ``least`` up that wastes the fewest slots, the larger on a tie."""
    padding: Callable[[int], int] = lambda unit: sum(-value % unit for value in values)  # noqa: E731
    return min(range(max(1, least), max([*values, least]) + 1), key=lambda unit: (padding(unit), -unit))


def pipeline_split(layers: int, stages: int, partition: tuple[int, ...] | None) -> list[tuple[int, int]]:
    """[start, end) of each pipeline stage, as ``get_pp_indices``: the rest goes to the middle, never to the last.

    Raises KVCatchError for an impossible split.
    """
    if partition is not None:
        if len(partition) != stages or sum(partition) != layers:
            raise KVCatchError(
                f"VLLM_PP_LAYER_PARTITION {','.join(map(str, partition))} does not split {layers} layers over {stages} "
                "stages.",
                "Give one number a stage that add up to the number of layers.",
            )
        sizes = list(partition)
    else:
        if stages > layers:
            raise KVCatchError(
                f"--pipeline-parallel-size {stages} is more than the {layers} layers.", "Use fewer stages."
            )
        sizes = [layers // stages] * stages
        rest = layers % stages
        for offset in range(2, rest + 2):
            sizes[-offset] += 1
    bounds, start = [], 0
    for size in sizes:
        bounds.append((start, start + size))
        start += size
    return bounds


def on_stage(groups: list[Group], bounds: tuple[int, int], last: bool) -> list[Group]:
    """The groups' layers that live on one stage; drafts live on the last (``_project_kv_cache_groups_to_worker``)."""
    start, end = bounds
    kept = []
    for group in groups:
        mine = tuple(spec for spec in group.specs if (start <= spec.index < end if not spec.draft else last))
        kept.append((group, mine))
    return [Group(mine, group.uniform) if mine else Group(()) for group, mine in kept]


def block_bytes(groups: list[Group], packed: bool) -> int:
    """Bytes of one block id on one rank: the widest group (``_get_kv_cache_bytes_per_block``)."""
    widest = max((sum(spec.page_bytes for spec in group.specs) for group in groups), default=0)
    if packed:
        unit = math.lcm(*(spec.alignment for group in groups for spec in group.specs))
        return -(-widest // unit) * unit
    return widest
