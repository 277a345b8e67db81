"""Findings that one snapshot already proves: the line in the header of ``top``, by the rules of ``doctor``."""

from __future__ import annotations

from kvcatch.analysis.doctor import glance

__all__ = ["glance"]
