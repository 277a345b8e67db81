"""Compilation of the kernels, cached on disk where a place for it can be found."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function as machine code, compiled on its first call."""
    try:
        fast: Callable[P, R] = numba.njit(cache=True, nogil=True, boundscheck=False)(function)
    except RuntimeError:
        # Neither the package folder nor a cache folder is writable: compile in every process.
        fast = numba.njit(nogil=True, boundscheck=False)(function)
    return fast
