"""The engine's nouns as they are recorded: configuration, and what a capture can lose. No I/O here."""

from __future__ import annotations

from typing import Any

import msgspec


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group of the engine.

    kind: full | mla | sliding | chunked | mamba | cross | other. page_bytes: bytes of one block of one
    layer. window: tokens (sliding) or chunk length (chunked), None elsewhere.
    """

    kind: str
    layers: int
    block_size: int
    page_bytes: int | None = None
    window: int | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved configuration of one engine core, as its recorder wrote it at start.

    num_blocks counts the null block, as vLLM's ``num_gpu_blocks`` does; usable blocks = num_blocks - 1.
    """

    engine: str = "vllm"
    engine_version: str = "unknown"
    kvcatch_version: str = "unknown"
    adapter: str = "generic"
    model: str | None = None
    num_blocks: int = 0
    block_size: int = 0
    hash_block_size: int | None = None
    block_bytes: int | None = None
    kv_cache_dtype: str | None = None
    groups: tuple[KVGroup, ...] = ()
    prefix_caching: bool | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    watermark_free_ratio: float | None = None
    policy: str | None = None
    scheduler: str | None = None
    async_scheduling: bool | None = None
    speculative: bool = False
    kv_connector: str | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    dp_rank: int = 0
    device: str | None = None
    pid: int = 0
    host: str | None = None
    start_unix_ns: int = 0
    start_monotonic_ns: int = 0
    sample_steps: int = 1
    config: dict[str, Any] = {}
    env: dict[str, str] = {}
    unknown: tuple[str, ...] = ()

    @property
    def usable_blocks(self) -> int:
        """Blocks that can hold tokens: all but the null block."""
        return max(0, self.num_blocks - 1)
