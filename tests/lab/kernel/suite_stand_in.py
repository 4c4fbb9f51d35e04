"""A small program in the place of Kubernetes' e2e.test: the same options, the same reports, and real requests to the cluster.

It runs by itself: `python suite_stand_in.py --ginkgo.focus=... `. STAND_IN_WAIT names a file that a test writes before it waits for a
signal.
"""

import json
import os
import re
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

PATIENCE = 60.0
ECHO = {"name": "c", "image": "registry.example/echo", "ports": [{"containerPort": 8080}]}
AGNHOST = {"name": "a", "args": ["netexec"]}


class Cluster:
    def __init__(self, kubeconfig: str) -> None:
        config = yaml.safe_load(Path(kubeconfig).read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._server = cluster["server"]
        self._tls = ssl.create_default_context(cafile=cluster.get("certificate-authority"), cadata=_data(cluster))
        self._token = user.get("token") or Path(user["tokenFile"]).read_text()

    def __call__(self, method: str, path: str, body: object = None) -> str:
        request = urllib.request.Request(
            self._server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, context=self._tls, timeout=PATIENCE) as answer:
            return str(answer.read().decode())

    def until(self, path: str, good: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                if good(found := self("GET", path)):
                    return
            except urllib.error.HTTPError as error:
                # Until the pod's container runs, it has no log, and the Service no endpoint.
                found = str(error)
            if time.monotonic() > deadline:
                raise AssertionError(f"timed out waiting for {path}\nlast: {found}")
            time.sleep(0.1)


def _data(cluster: dict[str, str]) -> str | None:
    import base64

    return base64.b64decode(text).decode() if (text := cluster.get("certificate-authority-data")) else None


def _namespace(api: Cluster, name: str, container: object) -> str:
    name = f"{name}-{os.urandom(3).hex()}"
    api("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    pod = {"metadata": {"name": "web", "labels": {"app": "web"}}, "spec": {"containers": [container]}}
    api("POST", f"/api/v1/namespaces/{name}/pods", pod)
    return f"/api/v1/namespaces/{name}"


def serve_a_pod(api: Cluster) -> None:
    at = _namespace(api, "serve", ECHO)
    api("POST", f"{at}/services", {"metadata": {"name": "web"}, "spec": {"selector": {"app": "web"}, "ports": [
        {"port": 80, "targetPort": 8080}]}})  # fmt: skip
    api.until(f"{at}/services/web:80/proxy/", lambda text: "web" in text)
    api("DELETE", at)


def run_the_image(api: Cluster) -> None:
    registries = yaml.safe_load(Path(os.environ["KUBE_TEST_REPO_LIST"]).read_text())
    at = _namespace(api, "image", {**AGNHOST, "image": f"{registries['promoterE2eRegistry']}/agnhost:2.63.0"})
    api.until(f"{at}/pods/web/log", lambda text: "agnhost netexec" in text)
    api("DELETE", at)


def fail(api: Cluster) -> None:
    raise AssertionError(
        f"Unexpected error:\n    {len(json.loads(api('GET', '/api/v1/nodes'))['items'])} nodes are odd\nmore"
    )


def wait_for_a_signal(_: Cluster) -> None:
    Path(os.environ["STAND_IN_WAIT"]).write_text(str(os.getpid()))
    time.sleep(PATIENCE)


class Skip(Exception):
    pass


def skip(_: Cluster) -> None:
    raise Skip("needs two families\nmore")


Case = tuple[str, Callable[[Cluster], None], tuple[str, ...]]
CASES: list[Case] = [
    ("[sig-other] is not chosen", skip, ()),
    ("[sig-network] DNS [Serial] runs last [Conformance]", serve_a_pod, ("Serial",)),
    ("[sig-network] Services are no conformance test", skip, ()),
    ("[sig-network] Services serve a pod [Conformance]", serve_a_pod, ()),
    ("[sig-network] Waiting takes a signal", wait_for_a_signal, ()),
    ("[sig-network] Services fail [Conformance]", fail, ()),
    ("[sig-other] is not chosen either", skip, ()),
    ("[sig-network] Services skip themselves [Conformance]", skip, ()),
    ("[sig-network] Pods run the image [Conformance]", run_the_image, ()),
]


def _post(host: str, path: str, body: object) -> None:
    urllib.request.urlopen(urllib.request.Request(host + path, json.dumps(body).encode()), timeout=PATIENCE).close()


def _poll(host: str, path: str) -> Any:
    while True:
        try:
            with urllib.request.urlopen(host + path, timeout=PATIENCE) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code != 425:
                raise
            time.sleep(0.05)


def _report(case: Case, state: str, seconds: float = 0.0, message: str = "") -> object:
    container, _, leaf = case[0].partition(" ")
    failure = {"Failure": {"Message": message, "ForwardedPanic": ""}} if message else {}
    return {"ContainerHierarchyTexts": [container], "ContainerHierarchyLabels": [None], "LeafNodeType": "It",
            "LeafNodeLabels": list(case[2]), "LeafNodeText": leaf, "State": state, "RunTime": int(seconds * 1e9),
            "CapturedGinkgoWriterOutput": f"ran {leaf}\x1b[0m\n", **failure}  # fmt: skip


def _run(case: Case, chosen: bool, api: Cluster) -> object:
    if not chosen:
        return _report(case, "skipped")
    begin = time.monotonic()
    try:
        case[1](api)
    except Skip as error:
        return _report(case, "skipped", 0.0, str(error))
    except AssertionError as error:
        return _report(case, "failed", time.monotonic() - begin, str(error))
    return _report(case, "passed", time.monotonic() - begin)


def main(options: dict[str, str]) -> int:
    if "version" in options:
        print("v1.36.2")
        return 0

    def chosen(name: str) -> bool:
        skips = options.get("ginkgo.skip")
        return bool(re.search(options["ginkgo.focus"], name)) and not (skips and re.search(skips, name))

    order = [case for case in CASES if not case[2]]
    if "ginkgo.dry-run" in options:
        reports = [_report(case, "passed" if chosen(case[0]) else "skipped") for case in CASES]
        Path(options["ginkgo.json-report"]).write_text(json.dumps([{"SpecReports": reports}]))
        return 0
    assert os.environ["GINKGO_PARALLEL_PROTOCOL"] == "HTTP"
    host, api = options["ginkgo.parallel.host"], Cluster(options["kubeconfig"])
    first = options["ginkgo.parallel.process"] == "1"
    _poll(host, "/up")
    _post(host, "/suite-will-begin", {})
    if first:
        nodes = json.loads(api("GET", "/api/v1/nodes"))["items"]
        zones = {each["metadata"]["labels"]["topology.kubernetes.io/zone"] for each in nodes}
        assert len(zones) == int(options["num-nodes"])
        _post(host, "/before-suite-completed", {"Data": "aGVsbG8=", "State": "passed"})
    else:
        assert _poll(host, "/before-suite-state")["Data"] == "aGVsbG8="
    while (index := _poll(host, "/counter")["Index"]) < len(order):
        _post(host, "/did-run", _run(order[index], chosen(order[index][0]), api))
    if first:
        _poll(host, "/have-nonprimary-procs-finished")
        for case in CASES:
            if case[2]:
                _post(host, "/did-run", _run(case, chosen(case[0]), api))
        _poll(host, "/aggregated-nonprimary-procs-report")
    _post(host, "/suite-did-end", {})
    return 0


if __name__ == "__main__":
    sys.exit(main({word.lstrip("-").partition("=")[0]: word.partition("=")[2] for word in sys.argv[1:]}))
