"""``kvcatch ls``."""

from __future__ import annotations

import json
import time

from fakes import api
from kvcatch.cli.main import main
from kvcatch.results import Result


class Found(Result, frozen=True):
    """What the API tells of one recorder."""

    name: str
    path: str
    state: str
    model: str | None = None
    pid: int | None = None
    start_unix_seconds: float | None = None
    last_unix_seconds: float | None = None
    last_step: int | None = None
    steps: int | None = None


NOW = time.time()
ROWS = [
    Found(
        name="m-1", path="/r/m-1.kvring", state="live", model="tiny", pid=11, start_unix_seconds=NOW - 90,
        last_unix_seconds=NOW, last_step=4500, steps=4500,
    ),
    Found(name="m-0\x1b[2J", path="/r/m-0.kvring", state="ended"),
]  # fmt: skip


def test_table_shows_alive_and_dead(monkeypatch, capsys):
    api.install(monkeypatch, {}, ROWS)
    assert main(["ls"]) == 0
    out, err = capsys.readouterr()
    head, live, dead = out.splitlines()
    assert head.split()[:4] == ["NAME", "STATE", "PID", "MODEL"]
    assert live.split()[:4] == ["m-1", "live", "11", "tiny"]
    assert "4,500" in live
    assert "90.00 s" in live
    assert dead.split()[1:4] == ["ended", "n/a", "n/a"]
    assert "\x1b" not in out
    assert "kvcatch top" in err


def test_json_and_live_filter(monkeypatch, capsys):
    api.install(monkeypatch, {}, ROWS)
    assert main(["ls", "--json", "--live"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    (only,) = document["recorders"]
    assert (only["name"], only["state"], only["last_step"]) == ("m-1", "live", 4500)


def test_nothing_to_list_is_no_error_and_says_how_to_start(monkeypatch, capsys):
    api.install(monkeypatch, {}, [])
    assert main(["ls"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "kvcatch run -- vllm serve" in err
