"""The Helm chart renders the objects of kustomize: each component, all of them, and none.

The package helm-python-sdk holds Helm's own engine. Where it has no wheel, a `helm` on the PATH renders; without either, the values are
checked with the chart's schema alone.
"""

import importlib.util
import json
import re
import shutil
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

import narthex
from narthex.linux.run import run
from narthex.proxy.kernel.dataplanes import DATAPLANES
from narthex.runtime.configuration.file import read

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "narthex"
COMPONENTS = {
    "overlay": "overlay",
    "cni": "cni",
    "cluster-dns": "clusterDns",
    "load-balancer": "loadBalancer",
    "announcer": "announcer",
    "dns": "dns",
    "sockets": "sockets",
}
"""By the name of the folder, the name in values.yaml."""
SERVER = "https://control-plane.example:6443"
ENGINE = "package" if importlib.util.find_spec("helm_python") else "program" if shutil.which("helm") else ""


def values(*components, **more):
    chosen = {COMPONENTS[name]: True for name in components}
    return {"apiServer": SERVER, "image": {"repository": "narthex"}, "components": chosen, **more}


def merged(given, defaults):
    """Values as Helm merges them with the defaults."""
    if not (isinstance(given, dict) and isinstance(defaults, dict)):
        return given
    return {**defaults, **given, **{key: merged(given[key], defaults[key]) for key in given.keys() & defaults.keys()}}


def problems(given):
    schema = json.loads((CHART / "values.schema.json").read_text())
    complete = merged(given, yaml.safe_load((CHART / "values.yaml").read_text()))
    return [each.message for each in jsonschema.Draft7Validator(schema).iter_errors(complete)]


def rendered(given, directory):
    """The objects of the chart, by kind and name."""
    if ENGINE == "package":
        from helm_python import Chart

        with Chart.load(CHART) as chart:
            chart.validate_schema(given)
            texts = list(chart.render(given, name="narthex", namespace="kube-system").values())
    else:
        file = directory / "values.yaml"
        file.write_text(yaml.safe_dump(given))
        texts = [run(["helm", "template", "narthex", str(CHART), "--namespace", "kube-system", "--values", str(file)])]
    return by_name(each for text in texts if "apiVersion" in text for each in yaml.safe_load_all(text))


def kustomized(folder, components, *, legacy=False):
    shutil.copytree(DEPLOY, folder)
    plan = folder / "kustomization.yaml"
    patches = "\npatches: [{path: iptables-legacy.yaml}]" if legacy else ""
    plan.write_text(plan.read_text() + f"\ncomponents: [{', '.join(components)}]{patches}\n")
    return by_name(yaml.safe_load_all(run(["kubectl", "kustomize", str(folder)])))


def by_name(objects):
    found = {(each["kind"], each["metadata"]["name"]): _comparable(each) for each in objects if each}
    assert found
    return found


def _comparable(value, key=""):
    """A value without the order of lists whose order means nothing, and with files parsed."""
    if isinstance(value, dict):
        return {name: _comparable(each, name) for name, each in value.items()}
    if isinstance(value, list):
        found = [_comparable(each) for each in value]
        if key in ("volumes", "volumeMounts", "env"):
            return sorted(found, key=lambda each: each.get("mountPath", each["name"]))
        if key == "add":
            return sorted(set(found))
        return [found[0], *sorted(found[1:])] if key == "args" else found
    if isinstance(value, str) and key.endswith((".json", ".conflist")):
        return json.loads(value)
    if isinstance(value, str) and key.endswith(".conf"):
        return list(yaml.safe_load_all(value))
    return value


CASES = [(), *((name,) for name in COMPONENTS), tuple(COMPONENTS)]


@pytest.mark.parametrize("components", CASES, ids=lambda case: "+".join(case) or "none")
def test_it_renders_the_objects_of_kustomize(tmp_path, components):
    given = values(*components)
    assert problems(given) == []
    if ENGINE:
        found, expected = rendered(given, tmp_path), kustomized(tmp_path / "deploy", components)
        assert sorted(found) == sorted(expected)
        for name, each in expected.items():
            assert found[name] == each, name


def test_nodes_with_iptables_legacy(tmp_path):
    given = values("overlay", mode="iptables", iptablesLegacy=True)
    assert problems(given) == []
    if ENGINE:
        name = ("DaemonSet", "narthex")
        assert rendered(given, tmp_path)[name] == kustomized(tmp_path / "deploy", ["overlay"], legacy=True)[name]


@pytest.mark.parametrize("mode", DATAPLANES)
def test_the_configuration_is_read_by_the_program(tmp_path, mode):
    given = values(mode=mode, kubeProxyConfiguration={"clusterCIDR": "10.244.0.0/16", "detectLocalMode": "ClusterCIDR"})
    assert problems(given) == []
    if ENGINE:
        (tmp_path / "config.conf").write_text(
            yaml.safe_dump_all(rendered(given, tmp_path)["ConfigMap", "narthex"]["data"]["config.conf"])
        )
        settings, wrong = read(tmp_path / "config.conf")
        assert (settings.mode, wrong, settings.own.parts.proxy) == (mode, (), True)
        assert settings.detect_local_mode == "ClusterCIDR"


def test_other_images_and_nodes(tmp_path):
    given = values(
        "load-balancer",
        image={"repository": "registry.example/narthex", "tag": "v1", "pullPolicy": "Always"},
        imagePullSecrets=[{"name": "pull"}],
        nodeSelector={"narthex": "yes"},
    )
    assert problems(given) == []
    if ENGINE:
        found = rendered(given, tmp_path)
        for name in (("DaemonSet", "narthex"), ("Deployment", "narthex-lb-controller")):
            pod = found[name]["spec"]["template"]["spec"]
            assert pod["imagePullSecrets"] == [{"name": "pull"}]
            for each in (*pod.get("initContainers", ()), *pod["containers"]):
                assert (each["image"], each["imagePullPolicy"]) == ("registry.example/narthex:v1", "Always")
        selector = found["DaemonSet", "narthex"]["spec"]["template"]["spec"]["nodeSelector"]
        assert selector == {"kubernetes.io/os": "linux", "narthex": "yes"}


@pytest.mark.parametrize(
    "given",
    [
        {**values(), "apiServer": ""},
        values(mode="ebpf"),
        values(components={"overlays": True}),
        values(tolerations={}),
        values(clusterDNS={}),
    ],
    ids=["no server", "mode", "component", "type", "unknown field"],
)
def test_wrong_values_are_refused(given):
    assert problems(given)
    if ENGINE == "package":
        from helm_python import Chart, HelmError

        with Chart.load(CHART) as chart, pytest.raises(HelmError):
            chart.validate_schema(given)


def test_the_schema_names_all_values():
    def check(schema, value, path):
        if isinstance(value, dict) and "properties" in schema:
            assert set(value) <= set(schema["properties"]), path
            for name, each in value.items():
                check(schema["properties"][name], each, f"{path}.{name}")

    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    check(schema, defaults, "values")
    assert set(schema["properties"]) - {"global"} == set(defaults)
    # Each value is used by a template.
    text = "".join(file.read_text() for file in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.(\w+)", text))
    assert used == set(defaults)
    assert set(schema["properties"]["components"]["properties"]) == set(COMPONENTS.values())


def test_the_versions_are_that_of_the_program():
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == narthex.__version__
    (image,) = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())["images"]
    assert image["newTag"] == narthex.__version__
    assert "version" in tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["dynamic"]
