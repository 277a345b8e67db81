"""The deployment recipes: valid for the systems they are for, and about verbs, options and ports that exist."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvcatch.cli import serve
from kvcatch.cli.main import build_parser
from kvcatch.gateway.policyfile import check
from kvcatch.views import mixin_rules

DEPLOY = Path(__file__).parents[3] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
PORT = int(serve.DEFAULT_LISTEN.rpartition(":")[2])


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def check_command(words: list[str]) -> None:
    """A kvcatch command line that the real parser accepts."""
    assert Path(words[0]).name == "kvcatch"
    args = build_parser(words[1]).parse_args(words[1:])
    assert args.verb == words[1]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_follow_the_schemas_of_kubernetes(path: Path) -> None:
    manifest = load(path)
    if manifest["apiVersion"] in ("apps/v1", "autoscaling/v2", "v1"):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    else:
        # Kinds of operators: their schemas are not part of Kubernetes.
        assert (manifest["apiVersion"], manifest["kind"]) in {
            ("monitoring.coreos.com/v1", "PodMonitor"), ("keda.sh/v1alpha1", "ScaledObject"),
        }  # fmt: skip
        assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}


def test_a_wrong_manifest_would_be_caught() -> None:
    manifest = load(DEPLOY / "kubernetes" / "engine.yaml")
    manifest["spec"]["template"]["spec"]["containers"][0]["port"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_the_sidecar_and_what_reads_it_fit_together() -> None:
    deployment = load(DEPLOY / "kubernetes" / "engine.yaml")
    pod = deployment["spec"]["template"]
    volumes = {row["name"] for row in pod["spec"]["volumes"]}
    ports = {}
    for container in pod["spec"]["containers"]:
        mounts = {row["name"]: row["mountPath"] for row in container["volumeMounts"]}
        assert set(mounts) <= volumes
        environment = {row["name"]: row["value"] for row in container["env"]}
        assert environment["KVCATCH_DIR"] == mounts["records"]
        ports |= {row["name"]: row["containerPort"] for row in container["ports"]}
        for probe in ("readinessProbe", "livenessProbe"):
            assert container.get(probe, {"httpGet": {"port": "http"}})["httpGet"]["port"] in ports
    assert ports["kvcatch"] == PORT
    check_command(pod["spec"]["containers"][1]["command"])
    monitor = load(DEPLOY / "kubernetes" / "podmonitor.yaml")["spec"]
    assert {row["port"] for row in monitor["podMetricsEndpoints"]} == set(ports)
    labels = pod["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_gateway_its_policy_and_its_service_fit_together() -> None:
    deployment = load(DEPLOY / "kubernetes" / "gateway.yaml")["spec"]
    pod = deployment["template"]
    (container,) = pod["spec"]["containers"]
    check_command(container["command"])
    options = build_parser("gateway").parse_args(container["command"][1:])
    assert options.replicas == deployment["replicas"]
    (port,) = container["ports"]
    assert options.listen.rpartition(":")[2] == str(port["containerPort"])
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": port["name"]}
    mounts = {row["name"]: row["mountPath"] for row in container["volumeMounts"]}
    assert {row["name"]: row["value"] for row in container["env"]} == {"KVCATCH_DIR": mounts["records"]}
    policy = load(DEPLOY / "kubernetes" / "gateway-policy.yaml")
    volumes = {row["name"]: row for row in pod["spec"]["volumes"]}
    assert set(mounts) <= set(volumes)
    assert volumes["policy"]["configMap"]["name"] == policy["metadata"]["name"]
    folder, _, name = options.config.rpartition("/")
    assert folder == mounts["policy"]
    assert check(policy["data"][name].encode())[1] == []
    service = load(DEPLOY / "kubernetes" / "gateway-service.yaml")["spec"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert [row["targetPort"] for row in service["ports"]] == [port["name"]]


def test_autoscalers_use_the_recorded_ratio_at_the_documented_target() -> None:
    rule = "model_name:kvcatch_committed:ratio"
    assert rule in mixin_rules.RECORDING
    hpa = load(DEPLOY / "kubernetes" / "hpa.yaml")["spec"]
    (metric,) = hpa["metrics"]
    assert metric["external"]["target"] == {"type": "Value", "value": "850m"}
    assert rule in (DEPLOY / "kubernetes" / "hpa.yaml").read_text()
    keda = load(DEPLOY / "kubernetes" / "keda.yaml")["spec"]
    (trigger,) = keda["triggers"]
    assert rule in trigger["metadata"]["query"]
    assert float(trigger["metadata"]["threshold"]) == mixin_rules.T.committed_target_ratio == 0.85
    name = load(DEPLOY / "kubernetes" / "engine.yaml")["metadata"]["name"]
    assert hpa["scaleTargetRef"]["name"] == keda["scaleTargetRef"]["name"] == name


def test_the_composition_mounts_what_exists_and_keeps_the_records() -> None:
    compose = load(DEPLOY / "compose.yaml")
    made_by_mixin = {"./mixin/rules", "./mixin/dashboards"}
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert source in made_by_mixin or (DEPLOY / source).exists(), source
            else:
                assert source in compose["volumes"]
    engine, sidecar = compose["services"]["engine"], compose["services"]["kvcatch"]
    assert "records:/var/lib/kvcatch" in engine["volumes"]
    assert "records:/var/lib/kvcatch" in sidecar["volumes"]
    check_command(sidecar["entrypoint"])
    jobs = {
        row["job_name"]: row["static_configs"][0]["targets"]
        for row in load(DEPLOY / "prometheus.yml")["scrape_configs"]
    }
    assert jobs == {"vllm": ["engine:8000"], "kvcatch": [f"kvcatch:{PORT}"]}
    source = load(DEPLOY / "grafana" / "datasource.yaml")["datasources"][0]
    assert source["url"] == "http://prometheus:9090"


def test_the_image_is_three_lines_on_top_of_the_engines() -> None:
    lines = [
        line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")
    ]
    assert lines[0].startswith("FROM vllm/vllm-openai:")
    assert len(lines) == 4
    entry = yaml.safe_load(lines[3].removeprefix("ENTRYPOINT "))
    assert entry == ["kvcatch", "run", "--", "vllm", "serve"]
    folder = re.fullmatch(r"ENV KVCATCH_DIR=(\S+)", lines[2])
    assert folder is not None
    assert folder.group(1) == "/var/lib/kvcatch"


def test_the_unit_starts_a_real_command_with_its_state_in_place() -> None:
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd" / "kvcatch-serve.service")
    service = unit["Service"]
    check_command(shlex.split(service["ExecStart"]))
    assert service["Environment"] == f"KVCATCH_DIR=/var/lib/{service['StateDirectory']}"
    assert service["ProtectSystem"] == "strict"
