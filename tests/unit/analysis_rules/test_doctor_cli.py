"""The verb: JSON contract, exit codes, mixed targets, and what it says of targets that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import rule_pages
from recordings import record, steady

import kvcatch
from kvcatch.cli.main import main
from kvcatch.sources.failures import parse_failures

DATA = Path(__file__).parents[2] / "data"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of 79.19 GiB "
    "of which 552.50 MiB is free. Including non-PyTorch memory, this process has 78.64 GiB memory in use. Of the "
    "allocated memory 74.91 GiB is allocated by PyTorch, with 626.00 MiB allocated in private pools (e.g., CUDA "
    "Graphs), and 1.78 GiB is reserved by PyTorch but unallocated."
)


def doctor(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict, str]:
    code = main(["doctor", "--json", *argv])
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err


def save(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_the_document_has_the_keys_that_scripts_use(burst, capsys):
    code, document, _ = doctor(capsys, burst)
    assert code == 1
    assert document["schema_version"] == 1
    for finding in document["findings"]:
        assert {"code", "severity", "title", "evidence", "cause", "remedy", "anchor"} <= finding.keys()
        assert finding["anchor"] == finding["code"].lower()
        assert finding["evidence"]
    severities = [finding["severity"] for finding in document["findings"]]
    assert severities == sorted(severities, key=["critical", "warning", "info"].index)
    found = {finding["code"] for finding in document["findings"]}
    assert not found & {row["code"] for row in document["not_checked"]}


def test_exit_codes(tmp_path, burst, calm, capsys):
    bad, good = burst, calm
    assert doctor(capsys, bad)[0] == 1
    assert doctor(capsys, bad, "--exit-zero")[0] == 0
    assert doctor(capsys, good)[0] == 0
    notes = record(tmp_path, steady(80, 0.001), max_num_seqs=4)
    assert doctor(capsys, notes, "--fail-on", "critical")[0] == 0
    assert doctor(capsys, notes)[0] == 0
    assert doctor(capsys, notes, "--fail-on", "info")[0] == 1


@pytest.mark.parametrize("text", ["", "<html>not metrics</html>", "just a line\n", "\0\1\2" * 40])
def test_unreadable_targets_exit_2(tmp_path, capsys, text):
    assert main(["doctor", save(tmp_path / "x", text)]) == 2
    assert "kvcatch: " in capsys.readouterr().err
    assert main(["doctor", str(tmp_path / "none.kvcap")]) == 2


def test_targets_of_three_kinds_together(tmp_path, calm, capsys):
    page = save(
        tmp_path / "page.prom",
        rule_pages.text({"num_requests_running": 0, "num_requests_waiting": 2, "kv_cache_usage_perc": 0, "prompt_tokens_total": 9, "num_preemptions_total": 0}, 1_764_439_200),
    )  # fmt: skip
    log = save(tmp_path / "server.log", OOM)
    code, document, said = doctor(capsys, calm, page, log)
    assert code == 1
    found = {finding["code"]: finding["title"] for finding in document["findings"]}
    assert found["KVC005"].startswith(page)
    assert {"KVC005", "KVC105"} <= found.keys()
    assert "3 engines (log, metrics, recording)" in said


def test_engines_of_one_service_with_other_block_sizes_do_not_fit_together(tmp_path, calm, capsys):
    one, other = calm, record(tmp_path, steady(60, 0.1), block_size=32)
    _, document, _ = doctor(capsys, one, other)
    (mismatch,) = [finding for finding in document["findings"] if finding["code"] == "KVC209"]
    assert "16 and 32" in mismatch["title"]


def test_verbose_says_what_was_not_looked_for(tmp_path, capsys):
    log = save(tmp_path / "server.log", OOM)
    main(["doctor", "-v", log])
    said = capsys.readouterr().err
    assert "not looked for: KVC003, KVC009; needs a record of requests" in said


def test_memory_is_explained_in_order_with_the_arithmetic(tmp_path, capsys):
    arguments = "non-default args: {'gpu_memory_utilization': 0.95}\n"
    _, document, _ = doctor(
        capsys, save(tmp_path / "server.log", "INFO 11-29 18:00:00 [x.py:1] " + arguments + OOM)
    )
    (finding,) = document["findings"]
    texts = [row["text"] for row in finding["evidence"]]
    assert [text[:2] for text in texts[:3]] == ["1.", "2.", "3."]
    by_text = {row["text"].strip()[:12]: row["value"] for row in finding["evidence"]}
    gib, mib = 1 << 30, 1 << 20
    # 79.19 GiB - 78.64 GiB - 552.5 MiB, and 78.64 - 74.91 - 1.78 GiB; printed with two decimals.
    assert by_text["3. card: 79."] == pytest.approx(79.19 * gib - 78.64 * gib - 552.5 * mib, abs=mib)
    assert by_text["this process"] == pytest.approx((78.64 - 74.91 - 1.78) * gib, abs=mib)
    assert by_text["budget: 0.95"] == pytest.approx((78.64 - 0.95 * 79.19) * gib, abs=mib)


def test_the_same_text_of_every_rank_is_one_finding():
    log = parse_failures([f"(Worker_TP{rank} pid={rank}) ERROR {OOM}" for rank in range(8)])
    assert len(log.oom) == 1


def test_find_is_the_same_from_python(burst):
    diagnosis = kvcatch.find(burst)
    assert diagnosis.findings[0].code in ("KVC001", "KVC002")
    assert diagnosis.to_dict()["findings"][0]["severity"] == diagnosis.findings[0].severity


def test_a_recording_cut_off_anywhere_is_still_read(tmp_path, burst, capsys):
    whole = Path(burst)
    torn = tmp_path / "torn.kvring"
    data = bytearray(whole.read_bytes())
    # A record header of no length in the middle of the words.
    data[4096 + 256 * 1024 + 4 * 40_000 : 4096 + 256 * 1024 + 4 * 40_000 + 4000] = bytes(4000)
    torn.write_bytes(data)
    code, document, _ = doctor(capsys, str(torn), "--no-prefix")
    assert code in (0, 1)
    assert document["targets"] == [str(torn)]
