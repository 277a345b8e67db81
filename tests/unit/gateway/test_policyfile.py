"""The policy file: every error with its line; the commands that findings print are commands of ours."""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
from pathlib import Path

import pytest

from kvcatch.cli import gateway as verb
from kvcatch.cli.main import VERBS, build_parser, main
from kvcatch.errors import KVCatchError
from kvcatch.gateway.policy import from_document
from kvcatch.gateway.policyfile import check
from kvcatch.gateway.reload import Reloader

from .stub import Stub, gateway

GOOD = """# a comment
[gateway]
upstreams = [
  "http://127.0.0.1:8000", # one
  "http://127.0.0.1:8001",
]
mode = "balanced"

[length]
max_input_tokens = 8000
over_long = "drop_turns"
[length.routes."/v1/completions"]
over_long = "reject"

[long]
share = 0.3
concurrency = 1

[limits]
tokens_per_minute = 100_000
[tenants.batch]
share = 0.5
requests_per_minute = 10
priority = 5
[tenant.keys]
"sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08" = "batch"
"""


def test_a_good_file_means_what_it_says():
    document, problems = check(GOOD.encode())
    assert problems == []
    policy = from_document(document)
    assert policy.length_of("/v1/chat/completions").over_long == "drop_turns"
    assert (policy.length_of("/v1/completions").over_long, policy.length_of("/v1/completions").max_input) == (
        "reject",
        8000,
    )
    assert policy.rules.long_enforced
    assert policy.rules.share_of("batch") == 0.5
    assert policy.wants("batch", 100, False)[0].limit == 10
    assert not policy.trust_header  # a key map is there: nobody names his own tenant


WRONG = [
    ("[gateway]\nmode = \"fast\"\n", 2, "gateway.mode", "not one of observe, balanced, strict"),
    ("[gateway]\n\n# x\nmod = 1\n", 4, "gateway.mod", "unknown; known here"),
    ("[nonsense]\na = 1\n", 1, "nonsense", "unknown; known here: gateway, length"),
    ("[length]\nmax_input_tokens = 0\n", 2, "length.max_input_tokens", "whole number from 1"),
    ("[length]\nmax_input_tokens = true\n", 2, "length.max_input_tokens", "whole number"),
    ("[long]\nshare = 1.5\n", 2, "long.share", "above 0 up to 1"),
    ("[tenants.a]\nshare = 0\n", 2, "tenants.a.share", "above 0"),
    ("[gateway]\nupstreams = [\n 'http://u:p@h'\n]\nlisten = 5\n", 5, "gateway.listen", "must be text"),
    ("[gateway]\nupstreams = ['http://u:secret@h']\n", 2, "gateway.upstreams", "without a password"),
    ("[length.routes.\"/v2\"]\nmax_input_tokens = 5\n", 1, "length.routes./v2", "no such route"),
    ("[tenant.keys]\nabc = 1\n", 2, "tenant.keys.abc", "must be text"),
    ("[gateway\nmode = 1\n", 1, "", "Expected"),
    ("[gateway]\nmode = \"observe\"\nmode = \"strict\"\n", 3, "", "overwrite"),
    ("a = '''\n[gateway]\nmode = 3\n'''\n", 1, "a", "unknown"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "where", "words"), WRONG)
def test_errors_name_line_field_and_what_is_wrong(text, line, where, words):
    _, problems = check(text.encode())
    assert [(problem.line, problem.where) for problem in problems][-1:] == [(line, where)]
    assert words in problems[-1].text
    assert "secret" not in problems[-1].text


def test_every_error_is_shown_at_once_and_the_exit_status_is_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "policy.toml"
    path.write_text("[long]\nshare = 2\nconcurrency = -1\n[gateway]\nmode = 1\n")
    assert main(["gateway", "--check", str(path)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [re.search(r"line (\d+)", line).group(1) for line in lines] == ["2", "3", "5"]
    path.write_text(GOOD)
    assert main(["gateway", "--check", str(path)]) == 0
    assert main(["gateway", "--config", str(tmp_path / "absent.toml")]) == 2


def _parser() -> argparse.ArgumentParser:
    return build_parser("gateway")


def test_options_win_over_the_file(tmp_path: Path):
    path = tmp_path / "policy.toml"
    path.write_text(GOOD)
    args = _parser().parse_args(
        [
            "gateway",
            "--config",
            str(path),
            "--max-input-tokens",
            "512",
            "--over-long",
            "reject",
            "--tenant-share",
            "a=b=0.25",
        ]
    )
    policy = from_document(verb._document(args))
    assert (policy.length.max_input, policy.length.over_long) == (512, "reject")
    assert policy.rules.share_of("a=b") == 0.25
    assert policy.rules.share_of("batch") == 0.5


SOURCES = Path(__file__).parents[3] / "src" / "kvcatch"
VALUES = {"N": "512", "URL": "http://127.0.0.1:8000", "TENANT": "team", "REQUEST": "r1"}


def commands() -> list[tuple[str, str]]:
    """Every ``kvcatch gateway|abort|hold …`` with options that the source prints, placeholders filled in."""
    found = []
    for path in sorted(SOURCES.rglob("*.py")) + sorted(SOURCES.rglob("*.toml")):
        if path.parts[-2] in ("gateway", "cli"):
            continue
        # A string may go on in the next literal of the source.
        text = re.sub(r"\"\s*\n\s*f?\"", "", path.read_text(encoding="utf-8"))
        text = re.sub(r"\{tenant\}=\{[^{}]*\}", "team=0.5", text)
        text = re.sub(r"\{[^{}\n]*\}", "512", text)
        for match in re.finditer(
            r"kvcatch (gateway|abort|hold)((?: (?!and|or|in|to|for|shows|says)[^\s\"'`;,.()]+(?:\.\d+)?)*)",
            text,
        ):
            words = match.group(2)
            if "--" in words:
                found.append((path.name, f"{match.group(1)}{words}"))
    return found


def test_the_sources_print_such_commands():
    assert {name for name, _ in commands()} >= {"rules_hold.py", "rules_stall.py"}


@pytest.mark.parametrize(("where", "command"), commands())
def test_every_command_that_a_finding_prints_is_accepted(where: str, command: str):
    words = shlex.split(command)
    if words[-1].startswith("--"):  # the number follows in another expression
        words.append("1024")
    args = build_parser(words[0]).parse_args(words)
    assert args.verb in VERBS
    if args.verb == "gateway":
        from_document(verb._document(args))


def test_a_changed_policy_holds_for_the_next_request_and_a_wrong_one_changes_nothing(tmp_path: Path):
    path = tmp_path / "policy.toml"

    async def scenario() -> None:
        stub = Stub()
        async with gateway(stub) as running:
            path.write_text("[length]\nmax_input_tokens = 4\n")
            args = _parser().parse_args(
                ["gateway", "--config", str(path), "--upstream", "http://127.0.0.1:1"]
            )
            document = verb._document(args)
            running.gate.use(from_document(document))
            reloader = Reloader(running.gate, document, lambda: verb._document(args), str(path))
            assert (await running.post())[0] == 413
            path.write_text("[length]\nmax_input_tokens = 4000\n")
            assert reloader.reload()
            assert (await running.post())[0] == 200
            path.write_text("[length]\nmax_input_tokens = -1\n")
            assert not reloader.reload()
            assert (await running.post())[0] == 200

    asyncio.run(scenario())


def test_a_wrong_option_is_said_before_anything_starts(capsys: pytest.CaptureFixture[str]):
    assert main(["gateway", "--long-share", "1.5"]) == 2
    assert "above 0 and up to 1" in capsys.readouterr().err
    assert main(["gateway", "--upstream", "ftp://x"]) == 2
    with pytest.raises(KVCatchError):
        from_document({"tenant": {"header": 3}})
