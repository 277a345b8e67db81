"""The one exception that reaches a user: what is wrong, and what to do about it."""

from __future__ import annotations


class KVCatchError(Exception):
    """A failure a person can act on.

    Args:
        message: what is wrong, with the offending value.
        hint: what to do, one sentence; printed after the message.
        exit_code: process exit status, 2 for bad usage or input.
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = 2) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


def missing_extra(package: str, extra: str) -> KVCatchError:
    """The error for an optional dependency that is not installed."""
    return KVCatchError(f"{package} is not installed.", f'Install it with: pip install "kvcatch[{extra}]"')
