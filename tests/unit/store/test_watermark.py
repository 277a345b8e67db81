"""The stored safe utilisation: taken up at once, expired by another configuration, never a reason to fail."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kvcatch.control.signals import stored_watermark
from kvcatch.errors import KVCatchError
from kvcatch.events import EngineInfo
from kvcatch.store.watermark import (
    config_hash,
    configuration,
    watermark_for,
    write_watermark,
)

ENGINE = EngineInfo(num_blocks=160, block_size=32, max_num_seqs=64, prefix_caching=True)


def document(**more: object) -> dict[str, object]:
    config = configuration(ENGINE)
    return {"schema_version": 1, "safe_utilization_ratio": 0.72, "config": config, "config_hash": config_hash(config), **more}  # fmt: skip


def test_assumed_then_measured_then_expired(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    assert watermark_for(ENGINE, folder) == (0.85, "assumed")
    write_watermark(document(), folder)
    assert watermark_for(ENGINE, folder) == (0.72, "measured")
    write_watermark(document(safe_utilization_ratio=0.6), folder)
    assert watermark_for(ENGINE, folder) == (0.6, "measured")
    smaller = msgspec.structs.replace(ENGINE, num_blocks=80)
    assert watermark_for(smaller, folder) == (0.6, "expired")


def test_what_one_side_does_not_know_does_not_expire_it(tmp_path: Path) -> None:
    write_watermark(document(), str(tmp_path))
    scraped = EngineInfo(num_blocks=160, block_size=32)
    assert watermark_for(scraped, str(tmp_path)) == (0.72, "measured")
    richer = msgspec.structs.replace(ENGINE, max_num_batched_tokens=512)
    assert watermark_for(richer, str(tmp_path)) == (0.72, "measured")


def test_the_engines_own_flag_does_not_expire_it(tmp_path: Path) -> None:
    write_watermark(document(), str(tmp_path))
    flagged = msgspec.structs.replace(ENGINE, watermark_free_ratio=0.1)
    assert watermark_for(flagged, str(tmp_path)) == (0.72, "measured")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"safe_utilization_ratio": true}', '{"safe_utilization_ratio": 85}', "\x00"]
)
def test_views_survive_a_damaged_file_and_the_scheduler_refuses_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "watermark.json").write_text(text)
    assert watermark_for(ENGINE, str(tmp_path)) == (0.85, "assumed")
    with pytest.raises(KVCatchError):
        stored_watermark({"KVCATCH_DIR": str(tmp_path)})


def test_the_scheduler_takes_it_only_for_its_own_configuration(tmp_path: Path) -> None:
    env = {"KVCATCH_DIR": str(tmp_path)}
    assert stored_watermark(env, ENGINE) is None
    path = write_watermark(document(), str(tmp_path))
    assert stored_watermark(env, ENGINE) == (0.72, path)
    assert stored_watermark(env) == (0.72, path)
    assert stored_watermark(env, msgspec.structs.replace(ENGINE, num_blocks=80)) is None
    (tmp_path / "watermark.json").write_text(json.dumps({"safe_utilization_ratio": 0.5}))
    assert stored_watermark(env, ENGINE) == (0.5, path)


def test_the_hash_changes_with_the_configuration_only() -> None:
    assert config_hash(configuration(ENGINE)) == config_hash(
        configuration(msgspec.structs.replace(ENGINE, pid=7))
    )
    assert config_hash(configuration(ENGINE)) != config_hash(
        configuration(msgspec.structs.replace(ENGINE, block_size=16))
    )


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KVCatchError, match="cannot write"):
        write_watermark(document(), str(tmp_path / "file"))
