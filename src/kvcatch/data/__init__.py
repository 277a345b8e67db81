"""Data that ships with kvcatch; origin and licence in NOTICE.md beside it."""

from __future__ import annotations

from pathlib import Path

#: the first 2,000 requests of Mooncake's conversation trace
CONVERSATION = Path(__file__).with_name("mooncake_conversation_2000.jsonl.gz")
