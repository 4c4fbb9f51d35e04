"""Ways to an API server: kubeconfig, service account, proxies, certificates, tokens, plugins."""

import asyncio
import base64
import json
import os
import socket
import ssl
import stat
from pathlib import Path

import pytest
import yaml
from tests.kube.following import following

from narthex.kube.access import Access, AccessError, open_connection
from narthex.kube.client import ApiClient, RateLimiter, Unreachable
from narthex.kube.messages import WatchRequest
from narthex.kube.resources import NODES
from narthex.kube.snapshot import read_once
from narthex.runtime.configuration.values import ClientConnection
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.build import node, service

CERTIFICATES = Path(__file__).parent / "certificates"
"""Made for these tests: an authority, a server named api.test and 127.0.0.1, a client."""


def pem(name):
    return (CERTIFICATES / name).read_bytes()


def inline(name):
    return base64.b64encode(pem(name)).decode()


@pytest.fixture
def plain():
    with FaultyApiServer() as server:
        server.put(node())
        yield server


@pytest.fixture
def secure():
    """A server that wants to see a certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=CERTIFICATES / "ca.pem")
    context.load_cert_chain(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED
    with FaultyApiServer(tls=context) as server:
        server.put(node())
        yield server


@pytest.fixture
def guarded():
    """A server that wants to see a token, over TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")
    with FaultyApiServer(tls=context, token="open-sesame") as server:
        server.put(node())
        yield server


def kubeconfig(tmp_path, server, user=None, **cluster):
    """A kubeconfig with one of everything."""
    path = tmp_path / "kubeconfig"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "it", "user": "me"}}],
                "clusters": [{"name": "it", "cluster": {"server": server} | cluster}],
                "users": [{"name": "me", "user": user or {}}],
            }
        )
    )
    return path


def nodes(path="", master=""):
    """The names of the Nodes that are seen this way."""
    access = Access(connection=ClientConnection(kubeconfig=str(path)), master=master)
    return [event.object.name for event in read_once(access, [NODES], 20)[0]]


def test_a_plain_url(plain):
    assert nodes(master=plain.url) == ["worker-a"]


def test_a_kubeconfig_without_secrets(plain, tmp_path):
    assert nodes(kubeconfig(tmp_path, plain.url)) == ["worker-a"]


@pytest.mark.row("27.2")
def test_the_url_given_beside_a_kubeconfig_wins(plain, tmp_path):
    assert nodes(kubeconfig(tmp_path, "http://127.0.0.1:1"), plain.url) == ["worker-a"]


def test_a_server_below_a_path_of_another(plain, tmp_path):
    with pytest.raises(Unreachable, match="404"):
        nodes(kubeconfig(tmp_path, f"{plain.url}/k8s/clusters/c-1"))
    assert plain.requests[-1].path == "/k8s/clusters/c-1/api/v1/nodes"


def test_certificates_in_the_file(secure, tmp_path):
    user = {"client-certificate-data": inline("client.pem"), "client-key-data": inline("client.key")}
    path = kubeconfig(tmp_path, secure.url, user, **{"certificate-authority-data": inline("ca.pem")})
    assert nodes(path) == ["worker-a"]


def test_certificates_beside_the_file(secure, tmp_path):
    for name in ("ca.pem", "client.pem", "client.key"):
        (tmp_path / name).write_bytes(pem(name))
    user = {"client-certificate": "client.pem", "client-key": "client.key"}
    assert nodes(kubeconfig(tmp_path, secure.url, user, **{"certificate-authority": "ca.pem"})) == ["worker-a"]


def test_a_server_that_nobody_vouches_for(guarded, tmp_path):
    with pytest.raises(Unreachable, match=r"(?i)certificate"):
        nodes(kubeconfig(tmp_path, guarded.url, {"token": "open-sesame"}))


def test_a_server_that_need_not_be_vouched_for(guarded, tmp_path):
    path = kubeconfig(tmp_path, guarded.url, {"token": "open-sesame"}, **{"insecure-skip-tls-verify": True})
    assert nodes(path) == ["worker-a"]


@pytest.mark.parametrize(("name", "good"), [("api.test", True), ("other.test", False)])
def test_the_name_in_the_servers_certificate(guarded, tmp_path, name, good):
    cluster = {"certificate-authority-data": inline("ca.pem"), "tls-server-name": name}
    path = kubeconfig(tmp_path, guarded.url, {"token": "open-sesame"}, **cluster)
    if good:
        assert nodes(path) == ["worker-a"]
    else:
        with pytest.raises(Unreachable, match=r"other\.test"):
            nodes(path)


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_plugin_brings_the_token(guarded, tmp_path, version):
    plugin = tmp_path / "plugin"
    plugin.write_text(
        "#!/bin/sh\n"
        'printf "%s" "$KUBERNETES_EXEC_INFO" > "$1"\n'
        'echo \'{"kind": "ExecCredential", "status": {"token": "\'$WORD\'"}}\'\n'
    )
    plugin.chmod(plugin.stat().st_mode | stat.S_IEXEC)
    command = {
        "apiVersion": f"client.authentication.k8s.io/{version}",
        "command": "./plugin",
        "args": [str(tmp_path / "told")],
        "env": [{"name": "WORD", "value": "open-sesame"}],
        "provideClusterInfo": True,
    }
    cluster = {"certificate-authority-data": inline("ca.pem")}
    assert nodes(kubeconfig(tmp_path, guarded.url, {"exec": command}, **cluster)) == ["worker-a"]
    told = json.loads((tmp_path / "told").read_text())
    assert told["apiVersion"] == command["apiVersion"] and told["spec"]["cluster"]["server"] == guarded.url


def test_a_plugin_works_in_the_thread_of_a_proxy(guarded, tmp_path):
    answer = '{"status": {"token": "open-sesame"}}'
    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": "echo", "args": [answer]}
    cluster = {"certificate-authority-data": inline("ca.pem")}
    path = kubeconfig(tmp_path, guarded.url, {"exec": command}, **cluster)
    with following(Access(connection=ClientConnection(kubeconfig=str(path)))) as it:
        it.wait(lambda: it.synced)


def test_a_plugin_that_fails_is_named(plain, tmp_path):
    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": "false"}
    with pytest.raises(Unreachable, match="false"):
        nodes(kubeconfig(tmp_path, plain.url, {"exec": command}))


def test_a_plugin_of_another_time(plain, tmp_path):
    command = {"apiVersion": "client.authentication.k8s.io/v7", "command": "true"}
    with pytest.raises(Unreachable, match="v7"):
        nodes(kubeconfig(tmp_path, plain.url, {"exec": command}))


def test_a_pod_has_a_service_account(guarded, tmp_path, monkeypatch):
    from lightkube.config import kubeconfig as theirs

    (tmp_path / "token").write_text("open-sesame\n")
    (tmp_path / "namespace").write_text("kube-system")
    (tmp_path / "ca.crt").write_bytes(pem("ca.pem"))
    # The place is fixed, as in every pod.
    monkeypatch.setattr(theirs.KubeConfig.from_service_account.__func__, "__defaults__", (str(tmp_path),))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(guarded.port))
    assert nodes() == ["worker-a"]


def test_this_is_no_pod(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(AccessError, match="--kubeconfig"):
        open_connection(Access())


def test_proxies(plain, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "")
    path = kubeconfig(tmp_path, "http://api.test:6443", **{"proxy-url": plain.url})
    # Our server answers what a proxy is asked for, whatever host it is meant for.
    assert nodes(path) == ["worker-a"]
    assert plain.requests[-1].headers["host"] == "api.test:6443"


def test_the_environments_proxy(plain, tmp_path, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", plain.url)
    monkeypatch.setenv("NO_PROXY", "")
    assert nodes(kubeconfig(tmp_path, "http://api.test:6443")) == ["worker-a"]
    assert plain.requests[-1].headers["host"] == "api.test:6443"
    monkeypatch.setenv("NO_PROXY", "api.test")
    with pytest.raises(Unreachable, match=r"api\.test"):
        nodes(kubeconfig(tmp_path, "http://api.test:6443"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a kubeconfig"),
        ("- a", "is not a kubeconfig"),
        ("a: [", "not valid YAML"),
        ("clusters: []\n", "current context"),
        ("clusters: []\ncurrent-context: x\n", "'x' not found"),
        ("clusters: []\ncurrent-context: x\ncontexts: [{name: x, context: {cluster: y}}]\n", "'y' is missing"),
        ("clusters: [{name: y, cluster: {server: 5}}]\n", "server"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_named(tmp_path, text, said):
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(AccessError) as caught:
        open_connection(Access(connection=ClientConnection(kubeconfig=str(path))))
    assert str(path) in str(caught.value) and said in str(caught.value)


def test_a_kubeconfig_that_is_not_there(tmp_path):
    with pytest.raises(AccessError, match="No such file"):
        open_connection(Access(connection=ClientConnection(kubeconfig=str(tmp_path / "none"))))


def test_changed_files_are_read_again(guarded, tmp_path):
    cluster = {"certificate-authority-data": inline("ca.pem")}
    path = kubeconfig(tmp_path, guarded.url, {"token": "wrong"}, **cluster)
    with following(Access(connection=ClientConnection(kubeconfig=str(path), qps=-1)), resources=[NODES]) as it:
        it.wait(lambda: any("401" in str(problem) for problem in it.source.problems))
        kubeconfig(tmp_path, guarded.url, {"token": "open-sesame"}, **cluster)
        it.wait(lambda: it.synced)


def test_nothing_of_this_is_loaded_before_it_is_needed():
    import subprocess
    import sys

    code = "import narthex.kube.source, sys; print([m for m in sys.modules if m in ('lightkube', 'httpx2')])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", ["plain", "guarded"])
def test_the_kernel_looks_after_idle_connections(kind, request, tmp_path):
    server = request.getfixturevalue(kind)
    cluster = {"certificate-authority-data": inline("ca.pem")} if kind == "guarded" else {}
    path = kubeconfig(tmp_path, server.url, {"token": "open-sesame"}, **cluster)

    async def look():
        api = ApiClient(Access(connection=ClientConnection(kubeconfig=str(path))))
        try:
            async with api.get(WatchRequest("/api/v1/nodes", (("watch", "true"),), True)) as answer:
                sock = answer._response.extensions["network_stream"].get_extra_info("socket")
                return [
                    sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                    sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                ]
        finally:
            await api.aclose()

    assert asyncio.run(look()) == [1, 30]


def test_compressed_lists_are_unpacked(plain):
    for number in range(400):
        plain.put(service(f"shop/s{number}", f"10.110.{number >> 8}.{number & 255}", annotations=(("a", "x" * 400),)))
    with following(plain.url, streaming=False) as it:
        it.wait(lambda: it.synced)
        assert len(it.services) == 400
    assert "gzip" in plain.requests[-1].headers["accept-encoding"]


@pytest.mark.row("27.2")
def test_requests_are_paced():
    pace = RateLimiter(5.0, 2)
    assert [pace.wait(0.0) for _ in range(4)] == pytest.approx([0, 0, 0.2, 0.4])
    assert pace.wait(10.0) == 0
    unlimited = RateLimiter(-1, 0)
    assert [unlimited.wait(0.0) for _ in range(99)] == [0.0] * 99
    default = RateLimiter(0, 0)
    assert [default.wait(0.0) for _ in range(11)][-1] == pytest.approx(0.2)
