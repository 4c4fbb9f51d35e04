"""Defaults of Services, and who may see the version."""

import ssl

import httpx2
import pytest

from narthex.lab.api.admission import admit
from narthex.lab.api.kinds import KINDS

from .bare_server import TOKEN, bare
from .registries import registry

PORTS = [{"port": 80}]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 5}}}, {"sessionAffinityConfig": None}),
        ({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {}}},
         {"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 10800}}}),
        ({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 7}}},
         {"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 7}}}),
        ({"externalIPs": ["192.0.2.1"]}, {"externalTrafficPolicy": "Cluster"}),
        ({"type": "NodePort", "externalTrafficPolicy": ""}, {"externalTrafficPolicy": "Cluster"}),
        ({}, {"externalTrafficPolicy": None, "sessionAffinity": "None"}),
    ],
)  # fmt: skip
def test_defaults(given, expected):
    meta = {"name": "1-web", "namespace": "default"}
    empty = registry()
    empty.create("Namespace", {"metadata": {"name": "default"}})
    made = admit(empty, KINDS["Service"], None, {"metadata": meta, "spec": {"ports": PORTS, **given}}, "")
    spec = made["spec"]
    assert {name: spec.get(name) for name in expected} == expected


def test_the_version_and_health_are_public_and_metrics_are_not(tmp_path):
    with bare(tmp_path) as server:
        context = ssl.create_default_context(cafile=str(server.certificate))
        with httpx2.Client(base_url=server.url, verify=context, timeout=60) as client:
            paths = ("/version", "/healthz", "/livez/ping", "/readyz", "/api", "/metrics", "/versions")
            codes = {path: client.get(path).status_code for path in paths}
            assert codes == {**dict.fromkeys(paths[:4], 200), **dict.fromkeys(paths[4:], 401)}
            headers = {"Authorization": f"Bearer {TOKEN}"}
            client.get("/api/v1/namespaces/default/pods/none", headers=headers)
            lines = client.get("/metrics", headers=headers).text.splitlines()
    labels = 'code="404",group="",resource="pods",subresource="",verb="GET",version="v1"'
    assert f"apiserver_request_total{{{labels}}} 1.0" in lines
    assert 'apiserver_storage_objects{resource="namespaces"} 2.0' in lines
