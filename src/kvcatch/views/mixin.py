"""Everything Prometheus and Grafana need, written into a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from kvcatch.errors import KVCatchError
from kvcatch.views import mixin_boards, mixin_rules
from kvcatch.views.mixin_routers import Measured, routers
from kvcatch.views.mixin_runbook import runbook
from kvcatch.views.yaml import dump

_KUBERNETES = "monitoring.coreos.com/v1"


def contents(runbook_url: str, measured: Sequence[Measured] = ()) -> dict[str, str]:
    """Relative path -> text of every file of the mixin.

    ``rules/`` holds plain Prometheus rule files, ``dashboards/`` Grafana JSON, ``kubernetes/`` the same
    rules as a PrometheusRule and the boards as a ConfigMap, ``routers/`` the configuration of routers and
    autoscalers where a watermark was measured.
    """
    recording, alerts = mixin_rules.recording_rules(), mixin_rules.alert_rules(runbook_url)
    boards = {
        name: json.dumps(board, indent=1) + "\n" for name, board in mixin_boards.boards(runbook_url).items()
    }
    rule = {
        "apiVersion": _KUBERNETES,
        "kind": "PrometheusRule",
        "metadata": {"name": "kvcatch", "labels": {"app.kubernetes.io/name": "kvcatch"}},
        "spec": {"groups": [*recording["groups"], *alerts["groups"]]},
    }
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "kvcatch-dashboards", "labels": {"grafana_dashboard": "1"}},
        "data": boards,
    }
    return {
        "rules/kvcatch-recording.yml": dump(recording),
        "rules/kvcatch-alerts.yml": dump(alerts),
        **{f"dashboards/{name}": text for name, text in boards.items()},
        "kubernetes/prometheusrule.yaml": dump(rule),
        "kubernetes/dashboards-configmap.yaml": dump(config),
        **(routers(measured) if measured else {}),
        "runbook.md": runbook(),
    }


def write(folder: str, runbook_url: str, force: bool = False, measured: Sequence[Measured] = ()) -> list[str]:
    """Write the mixin. Returns the paths. Raises KVCatchError rather than overwrite without ``force``."""
    files = {os.path.join(folder, name): text for name, text in contents(runbook_url, measured).items()}
    existing = [path for path in files if os.path.exists(path)]
    if existing and not force:
        raise KVCatchError(f"{existing[0]} exists.", "Add --force to overwrite the mixin in that folder.")
    try:
        for path, text in files.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise KVCatchError(f"{error.filename or folder}: {error.strerror}.") from None
    return list(files)
