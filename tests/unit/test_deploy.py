"""The files of deploy/: they parse, and what they name (flags, endpoints, metrics, files, extras) is there."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout.cli.main import parser_of
from rollout.cli.setting_flags import given_flags
from rollout.config import Settings
from rollout.config.gateway_settings import GatewayFile, GatewaySettings
from rollout.metrics.definitions import HISTOGRAMS, METRICS
from rollout.metrics.prometheus import prometheus_name
from rollout.settings_sources import load_program, load_settings, setting_keys
from rollout_gateway.http.access import OPEN_PATHS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
#: Seconds for which a worker may close after its drain.
CLOSE_S = 60


def worker_settings(arguments: list[str]) -> Settings:
    """The settings of `rollout serve ARGUMENTS`, by its own parser."""
    given = vars(parser_of("serve").parse_args(arguments))
    return load_settings(None, {}, {key.path: given[key.path] for key in setting_keys() if key.path in given})


def gateway_settings(arguments: list[str]) -> GatewaySettings:
    given = parser_of("gateway").parse_args(arguments)
    return load_program(GatewayFile, None, {}, given_flags(given, GatewayFile)).gateway


# --- Dockerfile ------------------------------------------------------------------------------------------------------


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile: name and the rest, with lines that go on joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        (name.upper(), rest.strip())
        for line in joined.splitlines()
        if (parts := line.strip().partition(" "))
        for name, _, rest in [parts]
        if name
    ]


def complaints(text: str) -> list[str]:
    """What a linter of Dockerfiles would say."""
    found, all_of = [], instructions(text)
    of = lambda name: [rest for each, rest in all_of if each == name]  # noqa: E731
    for image in of("FROM"):
        tag = image.split()[0].rpartition("/")[2].partition(":")[2]
        if not tag or tag == "latest":
            found.append(f"the base {image} has no fixed tag")
    if not of("USER") or of("USER")[-1] in ("root", "0"):
        found.append("the image runs as root")
    for name in ("ENTRYPOINT", "CMD"):
        for rest in of(name):
            try:
                words = json.loads(rest)
            except json.JSONDecodeError:
                words = None
            if not isinstance(words, list):
                found.append(f"{name} is not in exec form")
    if not of("HEALTHCHECK"):
        found.append("there is no HEALTHCHECK")
    if of("ADD"):
        found.append("ADD where COPY does")
    for name, rest in all_of:
        if name in ("ENV", "ARG") and re.search(r"KEY|TOKEN|SECRET|PASSWORD", rest):
            found.append(f"{name} has a secret")
        if name == "COPY":
            *sources, _ = [word for word in rest.split() if not word.startswith("--")]
            found += [f"COPY names {source}, which is not there" for source in sources if not (ROOT / source).exists()]
        if name == "RUN" and "apt-get install" in rest:
            found += [
                f"apt-get without {part}"
                for part in ("--no-install-recommends", "/var/lib/apt/lists")
                if part not in rest
            ]
        if name == "RUN" and "pip install" in rest:
            extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
            for asked in re.findall(r"\.\[([\w,-]+)\]", rest) or [""]:
                found += [f"there is no extra {extra!r}" for extra in asked.split(",") if extra not in extras]
            if "--no-cache-dir" not in rest:
                found.append("pip keeps its cache")
    return found


def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text()


def test_a_linter_has_nothing_to_say_about_the_dockerfile():
    assert complaints(dockerfile()) == []
    assert ("ENTRYPOINT", '["rollout"]') in instructions(dockerfile())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cuda:13.0.1-base-ubuntu24.04", "cuda:latest"),
        ("cuda:13.0.1-base-ubuntu24.04", "cuda"),
        ("USER 10001", "USER root"),
        ('ENTRYPOINT ["rollout"]', "ENTRYPOINT rollout"),
        ("COPY kernels kernels", "COPY kernel kernels"),
        ("'.[worker,http]'", "'.[workers,http]'"),
        ("--no-install-recommends ", ""),
        ("HEALTHCHECK", "LABEL"),
        ("ENV PATH", "ENV WANDB_API_KEY=1 PATH"),
    ],
)
def test_the_linter_finds_what_is_wrong(old, new):
    assert old in dockerfile() and complaints(dockerfile().replace(old, new))


def test_the_image_has_all_that_the_package_is_built_from():
    copied = {word for name, rest in instructions(dockerfile()) if name == "COPY" for word in rest.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {
        pattern for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"] if "*" not in pattern
    }
    folders = {Path(project["tool"]["setuptools"]["package-dir"].get(name, name)).parts[0] for name in packages}
    files = {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"}
    assert copied == folders | files
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == copied


def test_the_image_checks_the_port_that_it_sets():
    environ = dict(
        pair
        for name, rest in instructions(dockerfile())
        if name == "ENV"
        for pair in (word.split("=", 1) for word in shlex.split(rest))
    )
    port = load_settings(None, {name: value for name, value in environ.items() if name.startswith("ROLLOUT_")}, {})
    (check,) = (rest for name, rest in instructions(dockerfile()) if name == "HEALTHCHECK")
    assert f"127.0.0.1:{port.metrics.metrics_port}/health" in check


def _builder() -> str | None:
    for name in ("docker", "podman"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, timeout=60).returncode == 0:
            return name
    return None


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_image_runs_the_demo_model():
    builder = _builder()
    if builder is None:
        pytest.skip("neither docker nor podman runs here")
    image = "rollout-engine:test"
    subprocess.run([builder, "build", "-f", str(DEPLOY / "Dockerfile"), "-t", image, str(ROOT)], check=True)
    model = "/opt/rollout/rollout/demo/checkpoints/ones"
    started = subprocess.run(
        [builder, "run", "-d", "--rm", image, "serve", model, "--device", "cpu"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    try:
        asked = [
            builder,
            "exec",
            started,
            "rollout",
            "generate",
            "tcp://127.0.0.1:5757",
            "--prompt",
            "17:",
            "--max-tokens",
            "8",
            "--timeout-s",
            "120",
        ]
        assert "18" in subprocess.run(asked, check=True, capture_output=True, text=True, timeout=300).stdout
        user = subprocess.run([builder, "exec", started, "id", "-u"], check=True, capture_output=True, text=True)
        assert user.stdout.strip() == "10001"
    finally:
        subprocess.run([builder, "stop", started], check=True, capture_output=True)


# --- systemd ---------------------------------------------------------------------------------------------------------


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "rollout-worker.service")
    return parser


def test_the_unit_starts_a_worker_and_leaves_it_time_to_drain():
    service = unit()["Service"]
    program, command, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "rollout" and command == "serve"
    settings = worker_settings(
        [argument for argument in arguments if argument != "/etc/rollout/worker.toml" and argument != "--config"]
    )
    assert int(service["TimeoutStopSec"]) >= settings.service.drain_s + CLOSE_S
    assert service["KillMode"] == "mixed", "only the worker gets SIGTERM, and drains its own processes"
    assert service["RestartPreventExitStatus"] == "2"
    assert {"Unit", "Service", "Install"} == set(unit().sections())


# --- Kubernetes ------------------------------------------------------------------------------------------------------


def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def pod(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The specs of a Deployment's pod and of its container."""
    spec = manifests()["Deployment", name]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


def test_the_worker_has_a_gpu_shared_memory_and_time_to_drain():
    spec, container = pod("rollout-worker")
    assert container["args"][0] == "serve"
    settings = worker_settings(container["args"][1:])
    assert spec["terminationGracePeriodSeconds"] >= settings.service.drain_s + CLOSE_S
    assert container["resources"]["limits"]["nvidia.com/gpu"] == settings.engine.tensor_parallel
    (shm,) = (volume for volume in spec["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert not settings.security.insecure and settings.security.curve_secret_key is not None


@pytest.mark.parametrize("name", ["rollout-worker", "rollout-gateway"])
def test_ports_volumes_and_labels_of_a_pod_belong_together(name):
    spec, container = pod(name)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert {probe["port"] for probe in probes} <= set(ports)
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    service, deployment = manifests()["Service", name]["spec"], manifests()["Deployment", name]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"] == deployment["selector"]["matchLabels"] == labels
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    files = re.findall(r"=(/[\w./-]+)", " ".join(container["args"]))
    assert files and all(any(f"{file}/".startswith(f"{mount}/") for mount in mounts) for file in files)
    assert spec["securityContext"]["runAsNonRoot"] and f"USER {spec['securityContext']['runAsUser']}" in dockerfile()
    assert not container["image"].endswith(":latest") and ":" in container["image"]


def test_the_arguments_of_the_pods_agree_with_their_ports():
    _, container = pod("rollout-worker")
    settings = worker_settings(container["args"][1:])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    binds = settings.service.bind, settings.weights.bind
    assert [int(bind.rpartition(":")[2]) for bind in binds] == [ports["requests"], ports["weights"]]
    assert settings.metrics.metrics_port == ports["metrics"]
    _, container = pod("rollout-gateway")
    gateway = gateway_settings(container["args"][1:])
    service = manifests()["Service", "rollout-worker"]["spec"]
    assert gateway.endpoints == (f"tcp://rollout-worker:{service['ports'][0]['port']}",)
    assert gateway.port == container["ports"][0]["containerPort"] and gateway.api_key_file is not None
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > gateway.start_s


def test_probes_ask_endpoints_that_there_are():
    pages = "rollout_gateway/dialects/own.py", "rollout/metrics/prometheus.py"
    source = [(ROOT / page).read_text() for page in pages]
    for name, text in (("rollout-gateway", source[0]), ("rollout-worker", source[1])):
        _, container = pod(name)
        served = {word for quoted in re.findall(r'"([^"]*)"', text) for word in quoted.split()}
        for kind in ("startup", "liveness", "readiness"):
            assert container[f"{kind}Probe"]["httpGet"]["path"] in served
        assert container["livenessProbe"]["httpGet"]["path"] != "/health", "it is 503 while a worker drains or sleeps"
    _, gateway = pod("rollout-gateway")
    asked = {gateway[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert asked <= OPEN_PATHS, "the others ask for a bearer token"


# --- alerts ----------------------------------------------------------------------------------------------------------


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metric_names() -> set[str]:
    """Names on a worker's page and on a gateway's."""
    names = {prometheus_name(metric) for metric in METRICS}
    names |= {f"{prometheus_name(metric)}_{part}" for metric in HISTOGRAMS for part in ("bucket", "sum", "count")}
    reference = (ROOT / "docs/reference/metrics.md").read_text()
    names |= set(re.findall(r"`(rollout_report_\w+|rollout_worker_info)`", reference))
    return names | set(re.findall(r'"(rollout_gateway_\w+)"', (ROOT / "rollout_gateway/dialects/own.py").read_text()))


def test_each_alert_asks_for_metrics_that_there_are():
    named = {name for rule in rules() for name in re.findall(r"\brollout_\w+", rule["expr"])}
    assert len(named) > 10 and named <= metric_names()


def test_each_alert_has_what_prometheus_asks_for():
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert {"summary", "cure"} == set(rule["annotations"])
        for open_, close in ("()", "[]", "{}"):
            assert rule["expr"].count(open_) == rule["expr"].count(close)


def test_pages_that_alerts_name_are_there():
    pages = re.findall(r"docs/[\w./]+\.md", (DEPLOY / "alerts.yaml").read_text())
    assert pages and all((ROOT / page).is_file() for page in pages)


# --- pages -----------------------------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """The `rollout ...` commands in lines of a shell."""
    joined = re.sub(r"\\\n[# ]*", " ", text)
    found = re.findall(r"^[# ]*(?:srun .* |docker run .*)?(?:rollout|rollout-engine:\S+) ([a-z]+ \S.*)$", joined, re.M)
    return [shlex.split(re.sub(r"\[\.\.\.\]|\s&$", "", line), comments=True) for line in found]


@pytest.mark.parametrize("name", ["operations", "tensor_groups", "fleet"])
def test_commands_in_the_pages_of_operators_are_accepted(name):
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / f"docs/{name}.md").read_text(), re.M | re.S)
    found = commands("\n".join(blocks))
    assert found
    for command, *arguments in found:
        if "--help" not in arguments:
            parser_of(command).parse_args(arguments)


@pytest.mark.parametrize("name", ["Dockerfile", "kubernetes.yaml"])
def test_commands_in_the_comments_of_deploy_are_accepted(name):
    found = commands((DEPLOY / name).read_text())
    assert found
    for command, *arguments in found:
        parser_of(command).parse_args(arguments)
