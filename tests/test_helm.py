"""The Helm chart: rendered by Helm's own engine, judged by Kubernetes and by the daemon."""

import copy
import functools
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until

from emqtimerd import __version__
from emqtimerd.config import Settings, load
from emqtimerd.config import schema as configuration_schema
from emqtimerd.devnode import DevNode
from emqtimerd.devnode.node import free_port
from emqtimerd.shard import owner

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "emqtimerd"
SCHEMA = CHART / "values.schema.json"
CASES = sorted(file.stem for file in (CHART / "ci").glob("*.yaml"))
LONGEST = "x" + "-long" * 10 + "-x"  # 53 characters, the most that Helm takes
RELEASES = ("emqtimerd", "x", LONGEST)

OLDEST_KUBERNETES = "1.27"  # what Chart.yaml asks for
OPERATOR = "monitoring.coreos.com/v1"

# Helm's engine is a program in Go. In a process of its own it cannot meet this one's forks.
ENGINE = """
import functools, json, sys
import helm_python as helm

# Unbuffered, as PYTHONUNBUFFERED has it, print() loses what a write that was cut short left over.
answers = open(1, "w", closefd=False)
load = functools.cache(helm.Chart.load)

def render(chart, values, release):
    return load(chart).render(values, name=release, namespace="queues")

calls = {
    "render": render,
    "lint": lambda chart, values: helm.lint(chart, values, strict=True),
    "parse": helm.values_from_yaml,
    "package": lambda chart, to: helm.package(chart, destination=to),
}
for line in sys.stdin:
    name, *arguments = json.loads(line)
    try:
        answer = {"ok": calls[name](*arguments)}
    except helm.HelmError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), file=answers, flush=True)
"""


class Refused(Exception):
    """Helm does not render these values; the text is what a user would read."""


class Helm:
    """Helm's engine, asked in lines of JSON."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", ENGINE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, *call: object) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["ok"]

    def parse(self, text: str) -> Any:
        return self._ask("parse", text)

    def case(self, name: str) -> Any:
        return self.parse((CHART / "ci" / f"{name}.yaml").read_text())

    def lint(self, values: object) -> Any:
        return self._ask("lint", str(CHART), values)

    def package(self, to: Path) -> Path:
        return Path(self._ask("package", str(CHART), str(to)))

    def files(
        self, values: object, release: str = "emqtimerd", chart: Path = CHART
    ) -> dict[str, str]:
        """Every template's text under its name, those that made nothing left out.

        A chart in a place is read once: do not change it between two calls.
        """
        texts: dict[str, str] = self._ask("render", str(chart), values, release)
        return {name: text for name, text in texts.items() if text.strip()}

    def manifests(
        self, values: object, release: str = "emqtimerd", chart: Path = CHART
    ) -> list[dict[str, Any]]:
        """Everything that would be installed, tests included."""
        files = self.files(values, release, chart)
        return [self.parse(text) for name, text in files.items() if name.endswith(".yaml")]

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


def needed(module: str, package: str) -> Any:
    """A test's module; where it is missing the test is skipped, but fails in CI."""
    try:
        return importlib.import_module(module)
    except ImportError:
        reason = f"{module} is not here: pip install {package}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def helm() -> Iterator[Helm]:
    needed("helm_python", "helm-python-sdk")
    engine = Helm()
    yield engine
    engine.close()


def of(manifests: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def one(manifests: list[dict[str, Any]], *kinds: str) -> dict[str, Any]:
    (manifest,) = of(manifests, *kinds)
    return manifest


def daemon(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    template: dict[str, Any] = one(manifests, "Deployment", "StatefulSet")["spec"]["template"]
    return template


def pods(manifests: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every pod that would ever run, by its component."""
    found = {"daemon": daemon(manifests), "check": one(manifests, "Pod")}
    for job in of(manifests, "CronJob"):
        found["once"] = job["spec"]["jobTemplate"]["spec"]["template"]
    return found


def configuration(manifests: list[dict[str, Any]]) -> str:
    (config,) = (m for m in of(manifests, "ConfigMap") if "emqtimerd.toml" in m["data"])
    text: str = config["data"]["emqtimerd.toml"]
    return text


def environment(pod: dict[str, Any], name: str) -> dict[str, str]:
    """A container's variables, as the kubelet would fill them in for a pod of this name."""
    filled = {}
    for variable in pod["spec"]["containers"][0]["env"]:
        if "valueFrom" not in variable:
            filled[variable["name"]] = variable["value"]
        elif "fieldRef" in variable["valueFrom"]:
            assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
            filled[variable["name"]] = name
        else:
            filled[variable["name"]] = "redis://user:from-a-secret@valkey:6379/0"
    return filled


def with_value(values: object, path: str, value: object) -> Any:
    """A copy of the values with one of them set, as `helm --set` does it."""
    changed = copy.deepcopy(values)
    place: Any = changed
    *above, last = path.split(".")
    for key in above:
        place = place.setdefault(key, {})
    place[last] = value
    return changed


# --- each feature -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_lint_finds_nothing(case: str, helm: Helm) -> None:
    report = helm.lint(helm.case(case))
    assert report["errors"] == []
    assert [m["error"] for m in report["messages"]] == ["icon is recommended"]


def test_lint_takes_the_defaults_that_an_installation_must_complete(helm: Helm) -> None:
    assert helm.lint({})["errors"] == []


@functools.cache
def kubernetes_schemas() -> Any:
    # It reads five megabytes of definitions anew for each manifest.
    schemas = needed("kubernetes_validate.utils", "kubernetes-validate")
    schemas.schema_contents = functools.cache(schemas.schema_contents)
    return schemas


@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, "newest"])
@pytest.mark.parametrize("case", CASES)
def test_kubernetes_takes_every_manifest(case: str, version: str, helm: Helm) -> None:
    """Also refuses what its schemas do not know, as an API server does with Helm's requests."""
    schemas = kubernetes_schemas()
    version = schemas.latest_version() if version == "newest" else version
    for manifest in helm.manifests(helm.case(case)):
        if manifest["apiVersion"] != OPERATOR:
            schemas.validate(manifest, version, strict=True)


@pytest.mark.slow
def test_the_prometheus_operator_takes_what_is_made_for_it(helm: Helm) -> None:
    """One test, since the operator's types take seconds to load."""
    operator = needed(
        "cloudcoil.models.prometheus_operator.v1", "cloudcoil-models-prometheus-operator"
    )
    kinds = set()
    for case in CASES:
        for manifest in helm.manifests(helm.case(case)):
            if manifest["apiVersion"] == OPERATOR:
                kinds.add(manifest["kind"])
                taken = getattr(operator, manifest["kind"]).model_validate(manifest)
                # The types leave out what they do not know, where the operator's server refuses it.
                assert taken.model_dump(by_alias=True, exclude_unset=True, mode="json") == manifest
    assert kinds == {"PodMonitor", "ServiceMonitor", "PrometheusRule"}


@pytest.mark.parametrize("case", CASES)
def test_the_daemon_takes_the_rendered_configuration(case: str, helm: Helm, tmp_path: Path) -> None:
    values = helm.case(case)
    manifests = helm.manifests(values)
    text = configuration(manifests)
    # The same types too: 100 and 100.0 are equal in Python, and not for the daemon.
    wanted = {"shutdown_grace": "10s"} | values["config"]
    assert json.dumps(tomllib.loads(text), sort_keys=True) == json.dumps(wanted, sort_keys=True)

    file = tmp_path / "emqtimerd.toml"
    file.write_text(text)
    for component, pod in pods(manifests).items():
        variables = environment(pod, "emqtimerd-1")
        assert variables.pop("EMQTIMERD_CONFIG") == "/etc/emqtimerd/emqtimerd.toml"
        settings = load(file, variables, {}, needs_queues=True).settings
        assert list(settings.queues) == values["config"]["queues"]
        if component == "daemon":
            host = values.get("http", {}).get("address", "[::]").strip("[]")
            port = int(values.get("http", {}).get("port", 9846))
            assert (settings.http.listen.host, settings.http.listen.port) == (host, port)
            sharded = values.get("sharding", {}).get("enabled", False)
            expected = (1, values["replicas"]) if sharded else (0, 1)
            assert (settings.shard.index, settings.shard.count) == expected
        else:
            assert settings.shard.count == 1


def contains(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("case", CASES)
def test_selectors_find_the_daemon_and_nothing_else(case: str, release: str, helm: Helm) -> None:
    values = with_value(helm.case(case), "once", {"enabled": True})
    manifests = helm.manifests(values, release)
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(manifests).items()}
    assert set(labels) == {"daemon", "once", "check"}
    service = one(manifests, "Service")
    selectors = [
        *(
            m["spec"]["selector"]["matchLabels"]
            for m in of(manifests, "Deployment", "StatefulSet", "PodMonitor", "PodDisruptionBudget")
        ),
        service["spec"]["selector"],
        *(
            constraint["labelSelector"]["matchLabels"]
            for constraint in daemon(manifests)["spec"].get("topologySpreadConstraints", ())
        ),
    ]
    for selector in selectors:
        assert contains(labels["daemon"], selector)
        assert not contains(labels["once"], selector)
        assert not contains(labels["check"], selector)
    for monitor in of(manifests, "ServiceMonitor"):
        assert contains(service["metadata"]["labels"], monitor["spec"]["selector"]["matchLabels"])
    for policy in of(manifests, "NetworkPolicy"):
        assert all(
            contains(found, policy["spec"]["podSelector"]["matchLabels"])
            for found in labels.values()
        )


@pytest.mark.parametrize("case", CASES)
def test_ports_that_are_named_exist_and_metrics_outlive_readiness(case: str, helm: Helm) -> None:
    manifests = helm.manifests(helm.case(case))
    container = daemon(manifests)["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    listen = environment(daemon(manifests), "")["EMQTIMERD_HTTP__LISTEN"]
    assert ports == {"http": int(listen.rpartition(":")[2])}
    for probe, path in (
        ("startupProbe", "/healthz"),
        ("livenessProbe", "/healthz"),
        ("readinessProbe", "/readyz"),
    ):
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}
    service = one(manifests, "Service")["spec"]
    assert service["publishNotReadyAddresses"] is True
    (port,) = service["ports"]
    assert (port["name"], port["targetPort"]) == ("http", "http")
    for policy in of(manifests, "NetworkPolicy"):
        assert policy["spec"]["ingress"][0]["ports"] == [{"port": ports["http"], "protocol": "TCP"}]


@pytest.mark.parametrize("case", CASES)
def test_pods_are_restricted(case: str, helm: Helm) -> None:
    """What the Pod Security Standard of that name asks for, and no token and no variables."""
    values = with_value(helm.case(case), "once", {"enabled": True})
    for pod in pods(helm.manifests(values)).values():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"].get("runAsUser", 65532) != 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in spec["volumes"]:
            assert set(volume) - {"name"} <= {"configMap", "secret"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "command" not in container


@pytest.mark.parametrize("case", CASES)
def test_volumes_are_mounted_side_by_side_and_whole(case: str, helm: Helm) -> None:
    """No subPath, which never sees a change, and no mount inside another, which read-only ones
    refuse; and every file that a variable names lies in one."""
    for pod in pods(helm.manifests(helm.case(case))).values():
        (container,) = pod["spec"]["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
        assert not any("subPath" in mount for mount in container["volumeMounts"])
        places = [Path(path) for path in mounts.values()]
        assert not [(a, b) for a in places for b in places if a != b and a.is_relative_to(b)]
        files = [v for k, v in environment(pod, "").items() if re.search("_FILE$|_CONFIG$", k)]
        assert all(any(Path(f).is_relative_to(place) for place in places) for f in files)


@pytest.mark.parametrize("case", CASES)
def test_secrets_are_only_referred_to(case: str, helm: Helm) -> None:
    files = helm.files(helm.case(case))
    assert not re.search(r"://[^/@\s]*:[^@\s]*@", "\n".join(files.values()))
    manifests = helm.manifests(helm.case(case))
    assert of(manifests, "Secret") == []
    for pod in pods(manifests).values():
        for variable in pod["spec"]["containers"][0]["env"]:
            if re.search("PASSWORD|SECRET|TOKEN|KEY", variable["name"]):
                assert variable["name"].endswith("_FILE")


@pytest.mark.parametrize("case", CASES)
def test_the_notes_say_what_to_do_next(case: str, helm: Helm) -> None:
    values = helm.case(case)
    notes = helm.files(values, "clock")["emqtimerd/templates/NOTES.txt"]
    assert "helm test clock --namespace queues --logs" in notes
    (named,) = {m["metadata"]["name"] for m in of(helm.manifests(values, "clock"), "Service")}
    if values.get("replicas") == 0:
        assert "kubectl" not in notes
    else:
        kind = "statefulset" if case == "sharding" else "deployment"
        assert f"kubectl rollout status {kind}/{named} --namespace queues" in notes
    # The case `pods` has the whole URL from a Secret.
    assert ("no password is sent" in notes) == ("auth" not in values and case != "pods")
    assert ("names no registry" in notes) == (case not in ("pods", "global"))
    assert ("nothing scrapes" in notes) == (case not in ("podmonitor", "servicemonitor", "once"))
    assert "%!" not in notes
    assert "<no value>" not in notes


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [*RELEASES, "1x", "a.b-c", "team-emqtimerd", "9" * 53])
def test_names_and_labels_are_valid_for_every_release(release: str, helm: Helm) -> None:
    everything = {
        "once": {"enabled": True},
        "dashboard": {"enabled": True},
        "networkPolicy": {"enabled": True},
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "config": {"queues": ["orders"], "node": {"url": "redis://valkey"}},
    }
    manifests = helm.manifests(everything, release)
    sharded = helm.manifests(with_value(everything, "sharding", {"enabled": True}), release)
    for manifest in [*manifests, *sharded]:
        name = manifest["metadata"]["name"]
        # A Service's rule (RFC 1035) is the strictest. A CronJob adds 11 characters for its jobs,
        # and a StatefulSet's name stands in a label with as many after it.
        longest = 52 if manifest["kind"] in ("CronJob", "StatefulSet") else 63
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
        assert len(name) <= longest
    for found in (*manifests, *pods(manifests).values()):
        for value in found["metadata"]["labels"].values():
            assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", value)
            assert len(value) <= 63


def test_long_names_that_begin_alike_stay_apart(helm: Helm) -> None:
    values = helm.case("default")
    names = {
        one(helm.manifests(values, LONGEST[:-1] + end), "Service")["metadata"]["name"]
        for end in "xyz"
    }
    assert len(names) == 3


# --- values -------------------------------------------------------------------------------------


def plain(schema: Any) -> Any:
    """A part of the configuration's schema without what only tools show."""
    if isinstance(schema, dict):
        return {
            key: {name: plain(inner) for name, inner in value.items()}
            if key in ("properties", "$defs")
            else plain(value)
            for key, value in schema.items()
            if key not in ("title", "default", "$schema")
        }
    return [plain(item) for item in schema] if isinstance(schema, list) else schema


def with_configuration(chart_schema: dict[str, Any]) -> dict[str, Any]:
    """The chart's schema with the daemon's in it, as far as the chart leaves it to its users."""
    config = plain(configuration_schema())
    sections = config.pop("$defs")
    for name, section in (("http", "HttpSettings"), ("shard", "ShardSettings")):
        del config["properties"][name], sections[section]
    url = sections["NodeSettings"]["properties"]["url"]
    # Empty: not set yet, which a template refuses with better words.
    url["pattern"] = f"^$|{url['pattern']}"
    url["not"] = {"pattern": "://[^/@]*:[^@]*@"}
    url["description"] += "; without a password, which comes from a Secret (auth.existingSecret)"
    own = {name: part for name, part in chart_schema["$defs"].items() if name[0].islower()}
    return chart_schema | {
        "properties": chart_schema["properties"] | {"config": config},
        "$defs": own | sections,
    }


def test_the_schema_knows_every_setting_of_the_daemon() -> None:
    schema = json.loads(SCHEMA.read_text())
    assert schema == with_configuration(schema), "renew it: PYTHONPATH=. python tests/test_helm.py"


FREE = {  # names here are the user's own, or checked by Kubernetes
    "global",
    "extraLabels",
    "annotations",
    "service.labels",
    "service.annotations",
    "serviceAccount.annotations",
    "resources.requests",
    "resources.limits",
    "nodeSelector",
    "podAnnotations",
    "podLabels",
    "podMonitor.labels",
    "serviceMonitor.labels",
    "prometheusRule.labels",
    "prometheusRule.ruleLabels",
    "dashboard.labels",
    "dashboard.annotations",
    "once.resources.requests",
    "once.resources.limits",
}
DEEPER = (  # tables that are not among the defaults
    "config.promote",
    "config.stalled_check.mass_expiry",
    "config.node.tls",
    "config.node.sentinel.tls",
    "config.discovery",
    "config.log",
    "config.queue.orders",
    "config.queue.orders.promote",
    "config.queue.orders.stalled_check",
)


def tables(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and f"{above}{key}" not in FREE:
            yield f"{above}{key}"
            yield from tables(value, f"{above}{key}.")


def test_misspelt_keys_are_refused_at_every_level(helm: Helm) -> None:
    defaults = helm.parse((CHART / "values.yaml").read_text())
    places = ["", *(f"{path}." for path in (*tables(defaults), *DEEPER))]
    assert len(places) >= 39
    for place in places:
        with pytest.raises(Refused, match="mispelt"):
            helm.files(with_value(helm.case("default"), f"{place}mispelt", {}))
    for path, item in (
        ("config.match", {"glob": "a-*", "mispelt": {}}),
        ("config.match", {"glob": "a-*", "promote": {"mispelt": 1}}),
        ("tolerations", {"mispelt": "a"}),
        ("extraEnv", {"name": "A", "mispelt": "a"}),
        ("extraEnvFrom", {"mispelt": {}}),
        ("extraVolumeMounts", {"name": "a", "mountPath": "/a", "mispelt": "a"}),
        ("image.pullSecrets", {"name": "a", "mispelt": "a"}),
        ("networkPolicy.nodesAt", {"mispelt": {}}),
        ("networkPolicy.dnsAt", {"mispelt": {}}),
        ("networkPolicy.extraEgress", {"mispelt": []}),
        ("podMonitor.relabelings", {"mispelt": "a"}),
    ):
        with pytest.raises(Refused, match="mispelt"):
            helm.files(with_value(helm.case("default"), path, [item]))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("config.node.url", "", "config.node.url is not set"),
        ("config.queues", [], "nothing to sweep"),
        ("config.node.url", "redis://user:secret@valkey:6379/0", "/config/node/url"),
        ("config.node.url", "redis+cluster://:secret@a,b", "/config/node/url"),
        ("config.node.url", "http://valkey", "/config/node/url"),
        ("config.promote", {"interval": "5 s"}, "/config/promote/interval"),
        ("config.promote", {"limit": 1.5}, "/config/promote/limit"),
        ("config.promote", {"limit": 0}, "/config/promote/limit"),
        ("config.http", {"listen": "[::]:1"}, "http"),
        ("config.shard", {"index": 1, "count": 2}, "shard"),
        (
            "extraEnv",
            [{"name": "EMQTIMERD_NODE__URL", "value": "redis://:secret@valkey"}],
            "/extraEnv/0/value",
        ),
        ("extraEnv", [{"name": "EMQTIMERD_HTTP__LISTEN", "value": "[::]:1"}], "/extraEnv/0/name"),
        ("tls", {"existingSecret": "certificates"}, "does not ask for TLS"),
        ("auth.sentinel", {"existingSecret": "secret"}, "names no sentinels"),
        ("terminationGracePeriodSeconds", 10, "must be more than config.shutdown_grace"),
        ("once", {"enabled": True, "queues": ["a"], "startingDeadlineSeconds": 5}, "startingDead"),
        ("http.port", "http", "/http/port"),
        ("service.port", 0, "/service/port"),
        ("replicas", -1, "/replicas"),
        ("podSecurityContext.runAsUser", 0, "/podSecurityContext/runAsUser"),
    ],
)
def test_values_that_cannot_work_are_refused_with_a_reason(
    path: str, value: object, message: str, helm: Helm
) -> None:
    with pytest.raises(Refused) as refused:
        helm.manifests(with_value(helm.case("default"), path, value))
    assert message in str(refused.value)
    assert "secret@" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"podMonitor.enabled": True, "serviceMonitor.enabled": True},
            "every sum over the metrics would be doubled",
        ),
        (
            {"auth.existingSecret": "a", "config.node.password_file": "/run/password"},
            "keep one of the two",
        ),
        ({"sharding.enabled": True, "replicas": 0}, "at least one replica"),
        (
            {"prometheusRule": {"enabled": True, "disabled": ["EmqtimerdOverdue"]}},
            "alerts that do not exist: EmqtimerdOverdue",
        ),
        (
            {"once.enabled": True, "config.queues": [], "config.discovery": {"enabled": True}},
            "needs queues by name",
        ),
    ],
)
def test_values_that_contradict_one_another_are_refused(
    changes: dict[str, object], message: str, helm: Helm
) -> None:
    values = helm.case("default")
    for path, value in changes.items():
        values = with_value(values, path, value)
    with pytest.raises(Refused, match=message):
        helm.manifests(values)


def test_ports_may_be_numbers_or_texts(helm: Helm) -> None:
    paths = ("http.port", "service.port")
    numbers = texts = with_value(helm.case("default"), "networkPolicy", {"enabled": True})
    for path in paths:
        numbers, texts = with_value(numbers, path, 8080), with_value(texts, path, "8080")
    numbers["networkPolicy"]["nodePorts"] = [7000, 7001]
    texts["networkPolicy"]["nodePorts"] = ["7000", "7001"]
    assert helm.files(numbers) == helm.files(texts)


def test_values_stand_with_a_comment_above_each(helm: Helm) -> None:
    """Except for what Kubernetes defines, and explains better."""
    text = (CHART / "values.yaml").read_text()
    lines = text.splitlines()
    known = ("podSecurityContext", "securityContext", "resources", "labels")
    inside: list[tuple[int, str]] = []
    missing = []
    for number, line in enumerate(lines):
        if key := re.match(r"( *)([A-Za-z_]+):", line):
            depth = len(key[1])
            inside = [part for part in inside if part[0] < depth]
            if not any(part[1] in known for part in inside) and "#" not in lines[number - 1]:
                missing.append(key[2])
            inside.append((depth, key[2]))
    assert missing == []
    schema = json.loads(SCHEMA.read_text())
    assert set(schema["properties"]) - {"global", "enabled"} == set(helm.parse(text))


def test_it_is_a_subchart_too(helm: Helm, tmp_path: Path) -> None:
    """Behind a condition, with `global`, and twice under two names."""
    parent = tmp_path / "parent"
    shutil.copytree(CHART, parent / "charts" / "emqtimerd")
    (parent / "Chart.yaml").write_text(
        "apiVersion: v2\nname: parent\nversion: 1.0.0\ndependencies:\n"
        + "".join(
            f"  - {{name: emqtimerd, version: 0.1.0, condition: {condition}.enabled{alias}}}\n"
            for condition, alias in (("emqtimerd", ""), ("second", ", alias: second"))
        )
    )
    config = {"queues": ["orders"], "node": {"url": "redis://valkey"}}
    values = {
        "global": {"imageRegistry": "example", "storageClass": ""},
        "emqtimerd": {"enabled": True, "config": config},
        "second": {"enabled": True, "config": config},
    }
    found = helm.manifests(values, "shop", parent)
    names = [m["metadata"]["name"] for m in of(found, "Deployment")]
    assert sorted(names) == ["shop-emqtimerd", "shop-second"]
    first, second = (m["spec"]["selector"]["matchLabels"] for m in of(found, "Deployment"))
    assert first != second
    off = with_value(values, "second.enabled", False)
    assert len(of(helm.manifests(off, "shop", parent), "Deployment")) == 1


# --- the daemon's pod ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grace", "seconds"),
    [("0s", 10), ("250ms", 11), ("10s", 20), ("10.5s", 21), ("1.5m", 100), ("1h", 3610)],
)
def test_a_pod_may_take_longer_to_end_than_the_grace(grace: str, seconds: int, helm: Helm) -> None:
    values = with_value(helm.case("default"), "config.shutdown_grace", grace)
    spec = daemon(helm.manifests(values))["spec"]
    assert spec["terminationGracePeriodSeconds"] == seconds


def test_the_grace_is_the_daemons_own_where_the_chart_names_none(helm: Helm) -> None:
    defaults = helm.parse((CHART / "values.yaml").read_text())
    assert defaults["config"]["shutdown_grace"] == f"{Settings().shutdown_grace_seconds:g}s"


def test_the_checksum_follows_the_configuration_and_nothing_else(helm: Helm) -> None:
    def checksum(values: object) -> str:
        text: str = daemon(helm.manifests(values))["metadata"]["annotations"]["checksum/config"]
        return text

    values = helm.case("default")
    assert checksum(with_value(values, "podLabels", {"a": "b"})) == checksum(values)
    changes = {"config.queues": ["others"], "config.promote": {"limit": 101}}
    checksums = {checksum(with_value(values, path, value)) for path, value in changes.items()}
    assert len({checksum(values), *checksums}) == 3


def test_shards_are_counted_by_replicas_and_named_by_pods(helm: Helm) -> None:
    values = helm.case("sharding")
    manifests = helm.manifests(values)
    assert of(manifests, "Deployment") == []
    shards = one(manifests, "StatefulSet")
    assert shards["spec"]["replicas"] == 3
    assert shards["spec"]["podManagementPolicy"] == "Parallel"
    assert shards["spec"]["serviceName"] == one(manifests, "Service")["metadata"]["name"]
    for index in range(3):
        variables = environment(daemon(manifests), f"{shards['metadata']['name']}-{index}")
        variables.pop("EMQTIMERD_CONFIG")
        found = load(None, variables, {}).settings.shard
        assert (found.index, found.count) == (index, 3)


@pytest.mark.parametrize(
    ("url", "ports"),
    [
        ("redis://valkey", {6379}),
        ("rediss://user@valkey:6390/0", {6379, 6390}),
        ("redis://[fd00::1]:6390/0", {6379, 6390}),
        ("redis://[fd00::1]", {6379}),
        ("redis+sentinel://a:26380,b/mymaster/0", {6379, 26379, 26380}),
        ("valkeys+cluster://a:7000,[fd00::2]:7001,c:7000", {6379, 7000, 7001}),
        ("unix:///run/valkey.sock", {6379}),
    ],
)
def test_a_network_policy_lets_names_and_the_node_through(
    url: str, ports: set[int], helm: Helm
) -> None:
    values = with_value(helm.case("default"), "networkPolicy", {"enabled": True})
    policy = one(helm.manifests(with_value(values, "config.node.url", url)), "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    dns, node = policy["spec"]["egress"]
    assert dns == {"ports": [{"port": 53, "protocol": p} for p in ("UDP", "TCP")]}
    assert {(p["port"], p["protocol"]) for p in node["ports"]} == {(p, "TCP") for p in ports}


def test_a_drain_takes_one_pod_at_a_time_and_is_never_stuck(helm: Helm) -> None:
    budget = one(helm.manifests(helm.case("default")), "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_a_sweep_by_the_clock_never_meets_itself_and_always_ends(helm: Helm) -> None:
    job = one(helm.manifests(helm.case("once")), "CronJob")["spec"]
    assert job["concurrencyPolicy"] == "Forbid"
    assert job["startingDeadlineSeconds"] >= 10
    run = job["jobTemplate"]["spec"]
    assert run["backoffLimit"] == 0
    assert run["activeDeadlineSeconds"] > 240
    (container,) = run["template"]["spec"]["containers"]
    assert container["args"] == [
        "once",
        "--timeout=240",
        "--json",
        "--verb=promote",
        "--queue=orders",
        "--queue=with:colon",
    ]


def test_alerts_and_dashboard_arrive_as_they_are_in_the_chart(helm: Helm) -> None:
    values = with_value(helm.case("default"), "prometheusRule", {"enabled": True})
    rule = one(helm.manifests(values), "PrometheusRule")
    assert rule["spec"] == helm.parse((CHART / "files" / "alerts.yaml").read_text())
    dashboard = next(
        m
        for m in of(helm.manifests(helm.case("dashboard")), "ConfigMap")
        if "emqtimerd.json" in m["data"]
    )
    assert dashboard["metadata"]["namespace"] == "monitoring"
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert dashboard["data"]["emqtimerd.json"] == (CHART / "files" / "dashboard.json").read_text()


def test_alerts_link_to_runbooks_of_your_own_and_some_are_left_out(helm: Helm) -> None:
    values = helm.case("alerts")
    spec = one(helm.manifests(values), "PrometheusRule")["spec"]
    (shipped,) = helm.parse((CHART / "files" / "alerts.yaml").read_text())["groups"]
    for rule in shipped["rules"]:
        if "alert" in rule:
            rule["labels"]["team"] = "queues"
            anchor = f"#{rule['alert'].lower()}"
            rule["annotations"]["runbook_url"] = values["prometheusRule"]["runbookBase"] + anchor
    wanted = [r for r in shipped["rules"] if r.get("alert") != "EmqtimerdJobsOverdue"]
    assert len(wanted) == len(shipped["rules"]) - 1
    assert spec == {"groups": [shipped | {"rules": wanted}]}


@pytest.mark.parametrize(
    ("repository", "pulled"),
    [
        ("emqtimerd", "mirror.example/emqtimerd"),
        ("team/emqtimerd", "mirror.example/team/emqtimerd"),
        ("registry.example/emqtimerd", "registry.example/emqtimerd"),
        ("localhost/emqtimerd", "localhost/emqtimerd"),
        ("here:5000/emqtimerd", "here:5000/emqtimerd"),
    ],
)
def test_a_parents_registry_serves_images_that_name_none(
    repository: str, pulled: str, helm: Helm
) -> None:
    values = with_value(helm.case("default"), "image.repository", repository)
    values["global"] = {"imageRegistry": "mirror.example/"}
    for pod in pods(helm.manifests(values)).values():
        assert pod["spec"]["containers"][0]["image"] == f"{pulled}:{__version__}"


def test_a_parents_pull_secrets_join_the_charts_own_once_each(helm: Helm) -> None:
    found = daemon(helm.manifests(helm.case("global")))["spec"]["imagePullSecrets"]
    assert found == [{"name": "registry-login"}, {"name": "other-login"}]


# --- what is written about it -------------------------------------------------------------------


def documented_values() -> list[str]:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    return re.findall(r"<!-- values -->\n```yaml\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("number", range(len(documented_values())))
def test_the_documented_values_install_and_load(number: int, helm: Helm, tmp_path: Path) -> None:
    manifests = helm.manifests(helm.parse(documented_values()[number]))
    file = tmp_path / "emqtimerd.toml"
    file.write_text(configuration(manifests))
    variables = environment(daemon(manifests), "emqtimerd-0")
    del variables["EMQTIMERD_CONFIG"]
    load(file, variables, {}, needs_queues=True)


# --- the package --------------------------------------------------------------------------------


def test_the_chart_is_of_this_version_and_packs_what_it_needs(helm: Helm, tmp_path: Path) -> None:
    about = helm.parse((CHART / "Chart.yaml").read_text())
    assert about["appVersion"] == __version__
    assert about["kubeVersion"] == f">={OLDEST_KUBERNETES}.0-0"
    archive = helm.package(tmp_path)
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    unpacked = tmp_path / "unpacked" / "emqtimerd"
    assert not (unpacked / "ci").exists()
    values = with_value(helm.case("alerts"), "dashboard.enabled", True)
    assert helm.manifests(values, chart=unpacked) == helm.manifests(values)


# --- what is rendered, run ----------------------------------------------------------------------


def prepared(
    pod: dict[str, Any], manifests: list[dict[str, Any]], node: DevNode, directory: Path
) -> tuple[list[str], dict[str, str]]:
    """A container's command line and environment, with this test's node and file in them."""
    file = directory / "emqtimerd.toml"
    file.write_text(configuration(manifests))
    variables = environment(pod, "emqtimerd-0") | {
        "EMQTIMERD_CONFIG": str(file),
        "EMQTIMERD_NODE__URL": node.url,
    }
    arguments = pod["spec"]["containers"][0]["args"]
    outside = {k: v for k, v in os.environ.items() if not k.startswith("EMQTIMERD_")}
    return [sys.executable, "-m", "emqtimerd", *arguments], outside | variables


def answer(host: str, port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def ready(port: int) -> bool:
    try:
        return answer("127.0.0.1", port, "/readyz")[0] == 200
    except OSError:
        return False


def serve_and_stop(
    command: list[str], variables: dict[str, str], pod: dict[str, Any], port: int
) -> None:
    """Run a daemon's pod: wait until it is ready, ask all that is asked there, and stop it."""
    process = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: ready(port), "the pod is ready")
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            path = pod["spec"]["containers"][0][probe]["httpGet"]["path"]
            for host in ("127.0.0.1", "[::1]"):
                assert answer(host, port, path)[0] == 200
        assert "emqtimerd_build_info" in answer("[::1]", port, "/metrics")[1]
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=pod["spec"]["terminationGracePeriodSeconds"])
        assert process.returncode == 0, log
    finally:
        process.kill()
        process.communicate()


def test_the_pod_runs_answers_its_probes_in_both_families_and_ends_within_its_grace(
    helm: Helm, node: DevNode, tmp_path: Path
) -> None:
    port = free_port()
    manifests = helm.manifests(with_value(helm.case("default"), "http", {"port": port}))
    command, variables = prepared(daemon(manifests), manifests, node, tmp_path)
    serve_and_stop(command, variables, daemon(manifests), port)


def test_a_shard_without_a_queue_is_as_ready_as_the_others(
    helm: Helm, node: DevNode, tmp_path: Path
) -> None:
    port = free_port()
    values = with_value(helm.case("sharding"), "config.queues", ["orders"])
    manifests = helm.manifests(with_value(values, "http", {"port": port}))
    command, variables = prepared(daemon(manifests), manifests, node, tmp_path)
    idle = (owner("orders", 3) + 1) % 3
    variables["EMQTIMERD_SHARD__INDEX"] = f"emqtimerd-{idle}"
    serve_and_stop(command, variables, daemon(manifests), port)


@pytest.mark.parametrize("component", ["once", "check"])
def test_the_other_pods_run_too(component: str, helm: Helm, node: DevNode, tmp_path: Path) -> None:
    manifests = helm.manifests(with_value(helm.case("default"), "once", {"enabled": True}))
    command, variables = prepared(pods(manifests)[component], manifests, node, tmp_path)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if component == "once":
        assert [queue["queue"] for queue in json.loads(done.stdout)["queues"]] == ["orders"]


if __name__ == "__main__":
    renewed = with_configuration(json.loads(SCHEMA.read_text()))
    SCHEMA.write_text(json.dumps(renewed, indent=2, ensure_ascii=False) + "\n")
