"""The how-to pages: every command runs and prints what the page shows; both languages show the same."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvcatch.cli.main import main

ROOT = Path(__file__).parents[3]
PAGES = sorted(path for path in (ROOT / "docs" / "howto").glob("*.md") if not path.name.endswith(".zh.md"))
DATA = ROOT / "tests" / "data" / "howto"
#: what a shell would get; all others exit 0
STATUS = {
    "kvcatch doctor oom.log": 1,
    "kvcatch compare before.kvcap after.kvcap": 1,
}


def blocks(page: Path) -> list[str]:
    return re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


COMMANDS = [(page.stem, block) for page in PAGES for block in blocks(page)]


def test_there_are_three_pages_in_two_languages() -> None:
    assert [page.stem for page in PAGES] == [
        "low-hit-rate",
        "oom-with-free-memory",
        "slower-after-an-upgrade",
    ]
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in PAGES:
        other = page.with_name(page.stem + ".zh.md")
        assert blocks(page)
        assert blocks(other) == blocks(page)
        assert f"howto/{page.name}" in index
        assert f"howto/{other.name}" in index


@pytest.mark.parametrize(
    ("page", "block"), COMMANDS, ids=[f"{page} {n}" for n, (page, _) in enumerate(COMMANDS)]
)
def test_a_command_prints_what_its_page_shows(
    page: str, block: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, *shown = block.splitlines()
    words = shlex.split(command.removeprefix("$ "))
    assert words[0] == "kvcatch"
    monkeypatch.chdir(DATA)
    assert main(words[1:]) == STATUS.get(" ".join(words), 0)
    printed = iter(line.rstrip() for line in capsys.readouterr().out.splitlines())
    for line in shown:
        # In this order; lines between may be left out on the page.
        assert any(found == line.rstrip() for found in printed), line


def test_every_link_of_the_two_readmes_and_the_pages_leads_somewhere() -> None:
    readmes = [ROOT / "README.md", ROOT / "README.zh.md"]
    commands = []
    for page in [*readmes, *PAGES, *(page.with_name(page.stem + ".zh.md") for page in PAGES)]:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#]+)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
        if page in readmes:
            lines = re.findall(r"^    (\S.*)$", text, re.M)
            commands.append([line.partition("#")[0].strip() for line in lines])
    # Both languages name the same commands.
    assert commands[0] == commands[1]
