"""The generated pages are those of the code, and every metric, verb option and route is on a page."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kvcatch.cli import abort, gateway, hold, mixin, serve
from kvcatch.metrics import CATALOGUE
from kvcatch.views.docs import GENERATED
from kvcatch.views.web import _ROUTES

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_current(name: str) -> None:
    assert (DOCS / name).read_text() == GENERATED[name](), "run: python tools/docs_check.py"


def test_every_metric_is_on_the_page() -> None:
    page = (DOCS / "metrics.md").read_text()
    assert all(f"`{metric.name}`" in page for metric in CATALOGUE)


@pytest.mark.parametrize(
    ("verb", "module"),
    [("serve", serve), ("mixin", mixin), ("gateway", gateway), ("abort", abort), ("hold", hold)],
)
def test_every_option_of_the_verb_is_on_its_page(verb: str, module: object) -> None:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)  # type: ignore[attr-defined]
    page = (DOCS / "verbs" / f"{verb}.md").read_text()
    for action in parser._actions:
        for option in action.option_strings:
            assert option in ("-h", "--help") or f"`{option}" in page, option


def test_every_route_is_on_the_page() -> None:
    page = (DOCS / "verbs" / "serve.md").read_text()
    assert all(f"`{route}" in page for route in _ROUTES)
