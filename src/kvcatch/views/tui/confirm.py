"""The question before an engine is asked to do something, and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from textual.events import Key

from kvcatch.errors import KVCatchError
from kvcatch.views.palette import Line
from kvcatch.views.tui.screens import Page

#: seconds that a tenant is held from the screen; other times by ``kvcatch hold TENANT --for TIME``
HOLD_SECONDS = 600.0


class Operator(Protocol):
    """Who carries out what the screen offers; both answer in sentences and raise KVCatchError."""

    def abort(self, request_id: str) -> list[str]: ...

    def hold(self, tenant: str, seconds: float) -> list[str]: ...


class Confirm(Page):
    """Asks, acts on the key of one choice only, then shows what came of it.

    Args:
        question: what is asked, one line per sentence.
        choices: key to (its words, what it does); every other key but back and quit does nothing.
        ascii_only: draw with ASCII characters.
    """

    def __init__(
        self,
        question: list[str],
        choices: Mapping[str, tuple[str, Callable[[], list[str]]]],
        *,
        ascii_only: bool = False,
    ) -> None:
        super().__init__(self._told, ascii_only=ascii_only)
        self._question = question
        self._choices = choices
        self._asked = False
        self._answer: list[Line] = []

    def _told(self) -> list[Line]:
        lines: list[Line] = [[(line, "title")] for line in self._question]
        if self._asked:
            return [*lines, [], *(self._answer or [[("asking ...", "dim")]])]
        lines.append([])
        lines += [[(f"  {key}    ", "title"), (words, "")] for key, (words, _) in self._choices.items()]
        return [*lines, [("  esc  ", "title"), ("back, nothing is changed", "")]]

    def on_key(self, event: Key) -> None:
        """A choice is taken once; a second press does not ask again."""
        if event.key in self._choices and not self._asked:
            event.stop()
            self._asked = True
            self.redraw()
            self.run_worker(self._act(self._choices[event.key][1]))

    async def _act(self, act: Callable[[], list[str]]) -> None:
        try:
            self._answer = [[(line, "")] for line in await asyncio.to_thread(act)]
        except KVCatchError as error:
            self._answer = [[(line, "warning")] for line in (error.message, error.hint) if line]
        self.redraw()
