"""Each plugin that changes queries, and servers over TLS and HTTPS, asked by dig, kdig, and curl."""

import base64
import subprocess

import dns.message
import pytest
import yaml
from tests.dns.cluster import OBJECTS
from tests.dns.kernel.dns_server import ADDRESSES, DnsServer
from tests.dns.kernel.test_dns import labelled

from narthex.lab.encode import encode

pytestmark = pytest.mark.kernel
K8S = """kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
        zonal
        fallthrough in-addr.arpa ip6.arpa
    }"""
WORLD = "127.0.0.1:5300"
"""A server block of the same server in place of the world."""
COREFILE = """
.:53 {
    errors
    %(k8s)s
    rewrite name suffix .corp.example .svc.cluster.local answer auto
    rewrite name regex (.*)\\.(.*)\\.by\\.example {1}.{2}.svc.cluster.local answer auto
    rewrite continue ttl exact slow.world. 7
    acl secret.example {
        block
    }
    acl empty.example {
        filter
    }
    acl silent.example {
        drop
    }
    any
    chaos 1.2.3 Ada
    nsid here
    bufsize 1232
    dns64 {
        allow_ipv4
    }
    template IN A made.example {
        match ^ip-(?P<a>[0-9]+)-(?P<b>[0-9]+)[.]made[.]example[.]$
        answer "{{ .Name }} 60 IN A 10.0.{{ .Group.a }}.{{ index .Match 2 }}"
        fallthrough
    }
    transfer cluster.local {
        to 192.0.2.53
    }
    forward . %(world)s
    cache 30
}
.:5300 {
    template IN A world {
        answer "{{ .Name }} 60 IN A 192.0.2.80"
        authority "world. 60 IN NS ns.world."
    }
    template IN ANY world {
        authority "world. 60 IN SOA ns.world. host.world. 1 2 3 4 60"
    }
}
.:5301 {
    minimal
    header {
        response set ra
        response clear aa
    }
    forward . %(world)s
}
.:5302 {
    whoami
}
tls://.:853 {
    tls %(folder)s/tls.crt %(folder)s/tls.key
    %(k8s)s
    rewrite name suffix .corp.example .svc.cluster.local answer auto
}
https://.:443 {
    tls %(folder)s/tls.crt %(folder)s/tls.key
    %(k8s)s
    forward . %(world)s
}
https://.:8443 {
    %(k8s)s
}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dns")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-keyout", folder / "tls.key", "-out", folder / "tls.crt", "-subj", "/CN=dns.example",
         "-addext", "subjectAltName=DNS:dns.example,IP:10.96.0.10"],
        check=True, capture_output=True,
    )  # fmt: skip
    made = DnsServer(folder, "f")
    try:
        made.corefile.write_text(COREFILE % {"k8s": K8S, "world": WORLD, "folder": folder})
        text = "---\n".join(yaml.safe_dump(encode(each)) for each in labelled(*OBJECTS))
        (made.manifests / "all.yaml").write_text(text)
        yield made.start(f"--manifests={made.manifests}", "--workers=1").ready()
    finally:
        made.end()


def whole(server, *words, at=ADDRESSES[0]):
    """The output of dig without +short."""
    return server.run("dig", f"@{at}", "+time=5", "+tries=2", *words)


@pytest.mark.parametrize(
    ("name", "type_", "answer"),
    [
        ("web.shop.svc.cluster.local", "A", ["10.110.0.1"]),
        ("web.shop.corp.example", "A", ["10.110.0.1"]),
        ("_http._tcp.web.shop.corp.example", "SRV", ["0 100 80 web.shop.corp.example."]),
        ("web.shop.by.example", "A", ["10.110.0.1"]),
        ("ip-3-4.made.example", "A", ["10.0.3.4"]),
        ("x.world", "A", ["192.0.2.80"]),
        ("x.world", "AAAA", ["64:ff9b::c000:250"]),
        ("web.shop.svc.cluster.local", "AAAA", ["64:ff9b::a6e:1"]),
        ("ns.dns.cluster.local", "A", ["10.96.0.10", "192.0.2.53"]),
        ("x.empty.example", "A", []),
    ],
)
def test_plugins(server, name, type_, answer):
    assert server.dig(name, type_) == answer


def test_plugins_that_show_in_the_rest_of_a_message(server):
    assert "status: REFUSED" in (said := whole(server, "x.secret.example")) and "EDE: 15 (Blocked)" in said
    assert "EDE: 17 (Filtered)" in whole(server, "x.empty.example")
    assert server.dig("x.silent.example", "A", "+time=1", "+tries=1") is None
    assert '"ANY obsoleted" "See RFC 8482"' in whole(server, "x.world", "ANY", "+notcp")
    assert '"1.2.3"' in whole(server, "CH", "TXT", "version.bind")
    assert '("here")' in whole(server, "web.shop.svc.cluster.local", "+nsid")
    assert "slow.world.\t\t7\tIN" in whole(server, "slow.world")
    plain, short = whole(server, "-p", "5300", "x.world"), whole(server, "-p", "5301", "x.world")
    assert "AUTHORITY: 1" in plain and "flags: qr aa rd;" in plain
    assert "AUTHORITY: 0" in short and "flags: qr rd ra;" in short
    me = whole(server, "-p", "5302", "whatever.example")
    assert "_udp.whatever.example." in me and "10.96.0.10" in me


def test_a_zone_transfer(server):
    said = whole(server, "-b", "192.0.2.53", "cluster.local", "AXFR", at="192.0.2.53")
    assert "XFR size:" in said and "web.shop.svc.cluster.local. 5\tIN\tA\t10.110.0.1" in said
    assert said.count("SOA\tns.dns.cluster.local.") == 2
    assert "Transfer failed" in server.run("dig", "@10.96.0.10", "cluster.local", "AXFR")


@pytest.mark.parametrize(
    "how",
    [
        ("dig", "+tls"),
        ("dig", "+tls", "+keepopen"),
        ("kdig", "+tls-ca=%s", "+tls-host=dns.example"),
        ("dig", "+https"),
        ("dig", "+https-get"),
        ("kdig", "+https", "+tls-ca=%s", "+tls-host=dns.example"),
    ],
)
def test_encrypted_servers(server, how):
    program, *words = [word.replace("%s", str(server.folder / "tls.crt")) for word in how]
    said = server.run(program, "@10.96.0.10", *words, "+short", "web.shop.svc.cluster.local", "A")
    assert said.split() == ["10.110.0.1"]


def test_filters_over_tls(server):
    said = server.run("dig", "@10.96.0.10", "+tls", "+short", "web.shop.corp.example")
    assert said.split() == ["10.110.0.1"]


QUERY = dns.message.make_query("web.shop.svc.cluster.local", "A")
GET = base64.urlsafe_b64encode(QUERY.to_wire()).rstrip(b"=").decode()


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ((f"/dns-query?dns={GET}",), "200"),
        (("/dns-query", "-H", "content-type: application/dns-message", "--data-binary", "@query"), "200"),
        (("/dns-query", "--data-binary", "@query"), "415"),
        (("/dns-query?dns=%21%21",), "400"),
        (("/dns-query?dns=AAAA",), "400"),
        (("/dns-query", "-X", "DELETE"), "405"),
        (("/elsewhere",), "404"),
    ],
)
def test_http(server, version, arguments, status):
    (server.folder / "query").write_bytes(QUERY.to_wire())
    path, *others = (word.replace("@query", f"@{server.folder}/query") for word in arguments)
    out = server.folder / "out"
    said = server.run("curl", "-s", "-k", version, "-o", str(out), "-w", "%{http_code} %{content_type} %header{cache-control}",
                      f"https://10.96.0.10{path}", *others)  # fmt: skip
    assert said.split()[0] == status
    if status == "200":
        assert said.split()[1:] == ["application/dns-message", "max-age=5"]
        assert "10.110.0.1" in dns.message.from_wire(out.read_bytes()).to_text()


def test_several_requests_on_one_connection(server):
    for version, port, scheme in (("--http1.1", 443, "https"), ("--http2", 443, "https"), ("--http1.1", 8443, "http")):
        url = f"{scheme}://10.96.0.10:{port}/dns-query?dns={GET}"
        said = server.run(
            "curl",
            "-s",
            "-k",
            version,
            "-o",
            "/dev/null",
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}-%{num_connects} ",
            url,
            url,
        )
        assert said.split() == ["200-1", "200-0"]


def test_what_is_no_tls_does_no_harm(server):
    for port in (853, 443):
        server.run(
            "sh", "-c", f"printf 'GET / HTTP/1.0\\r\\n\\r\\n' | timeout 5 curl -s telnet://10.96.0.10:{port} || true"
        )
    assert server.run("dig", "@10.96.0.10", "+tls", "+short", "web.shop.svc.cluster.local").split() == ["10.110.0.1"]
