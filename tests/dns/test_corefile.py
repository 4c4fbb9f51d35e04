"""Corefiles as people have them, and what of them is a fault."""

from pathlib import Path

import msgspec
import pytest
from tests.dns import corefile_text

from narthex.dns.corefile.directive import reverse_zones
from narthex.dns.corefile.parse import CorefileError, parse
from narthex.dns.corefile.settings import (
    BindSettings,
    CacheBounds,
    CacheSettings,
    ConsolidateRule,
    CorefilePosition,
    ForwardSettings,
    HealthCheckSettings,
    HealthSettings,
    HostsSettings,
    HttpEndpoint,
    K8sExternalSettings,
    KubernetesSettings,
    LoadBalanceSettings,
    LogSettings,
    PrefetchSettings,
    ReloadSettings,
    ServeStaleSettings,
    Upstream,
    UpstreamTlsSettings,
)
from narthex.model.selector import parse_selector

FILES = Path(__file__).parent / "corefiles"
NAMES = sorted(path.name for path in FILES.iterdir())


def read(name):
    return parse((FILES / name).read_text(), name, load=lambda _: ())


def placeless(blocks):
    return [msgspec.structs.replace(block, where=CorefilePosition("", 0)) for block in blocks]


def faults(text, **how):
    with pytest.raises(CorefileError) as caught:
        parse(text, **how)
    assert len(caught.value.problems) == len(str(caught.value).splitlines())
    return str(caught.value).splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_corefiles_in_the_wild_are_read_and_printed(name):
    corefile = read(name)
    assert corefile.blocks
    printed = corefile_text.text(corefile.blocks)
    assert placeless(parse(printed).blocks) == placeless(corefile.blocks)


def test_kubeadm():
    (block,) = read("kubeadm").blocks
    assert (block.zones, block.port, block.where) == ((".",), 53, CorefilePosition("kubeadm", 2))
    assert block.health == HealthSettings(listen=HttpEndpoint("", 8080), lameduck=5.0)
    assert block.kubernetes == KubernetesSettings(
        zones=("cluster.local.", "in-addr.arpa.", "ip6.arpa."),
        pods="insecure",
        fallthrough=("in-addr.arpa.", "ip6.arpa."),
        ttl=30,
    )
    assert block.forwards == (ForwardSettings(zone=".", to=("/etc/resolv.conf",), max_concurrent=1000),)
    assert block.cache == CacheSettings(
        zones=(".",),
        success=CacheBounds(max_ttl=30),
        denial=CacheBounds(max_ttl=30),
        no_success=("cluster.local.",),
        no_denial=("cluster.local.",),
    )
    assert (
        block.loop
        and block.reload == ReloadSettings(interval=30.0, jitter=15.0)
        and block.loadbalance == LoadBalanceSettings()
    )
    assert (
        block.ready is not None and block.prometheus is not None and block.prometheus.listen == HttpEndpoint("", 9153)
    )


def test_options_without_effect_are_told():
    problems = [str(problem) for problem in read("kubeadm-1.13").problems]
    assert [line.split(": ")[:4] for line in problems] == [
        ["kubeadm-1.13:7", "warning", "kubernetes", "upstream"],
        ["kubeadm-1.13:8", "warning", "kubernetes", "resyncperiod"],
    ]


def test_stub_domains():
    corp, quad, rest = read("stub-domains").blocks
    assert corp.zones == ("corp.example.", "20.10.in-addr.arpa.", "21.10.in-addr.arpa.", "22.10.in-addr.arpa.",
                          "23.10.in-addr.arpa.")  # fmt: skip
    assert corp.errors is not None
    assert corp.errors.consolidate == (ConsolidateRule(interval=300.0, pattern=".* i/o timeout$", level="warning"),)
    (forward,) = corp.forwards
    assert forward.to == (Upstream("10.0.0.10"), Upstream("10.0.0.11", 1053), Upstream("2001:db8::35"))
    assert forward.policy == "round_robin" and forward.max_fails == 3 and forward.expire == 20.0
    assert forward.health_check == HealthCheckSettings(interval=2.0, recursion=False, domain="corp.example.")
    assert corp.cache == CacheSettings(
        zones=("corp.example.",),
        success=CacheBounds(capacity=5000, max_ttl=3600, min_ttl=10),
        denial=CacheBounds(capacity=2500, max_ttl=60),
        prefetch=PrefetchSettings(amount=10, window=60.0, percent=20),
        stale=ServeStaleSettings(max_stale=7200.0, verify=True),
        servfail=2.0,
    )
    assert quad.forwards[0].to == (Upstream("9.9.9.9", 853, "tls"),)
    assert quad.forwards[0].tls == UpstreamTlsSettings(server_name="dns.quad9.net")
    lab, other = rest.forwards
    assert lab.next_on == (3, 2) and lab.zone == "lab.example."
    assert other.failover_on == (2, 5) and other.force_tcp and other.excluded == ("lab.example.", "internal.")
    assert rest.hosts == HostsSettings(
        zones=(".",),
        inline=("10.1.2.3 gateway.example gw", "fd00::3 gateway.example"),
        reverse=False,
        fallthrough=(".",),
    )


def test_node_local():
    cluster, reverse, rest = read("nodelocal").blocks
    assert cluster.bind == BindSettings(to=("169.254.20.10", "10.96.0.10"))
    assert cluster.health == HealthSettings(listen=HttpEndpoint("169.254.20.10", 8080))
    assert cluster.forwards[0].force_tcp
    assert reverse.zones == ("in-addr.arpa.", "ip6.arpa.") and rest.zones == (".",)


def test_all_options_of_the_cluster():
    (block,) = read("external").blocks
    assert block.kubernetes == KubernetesSettings(
        zones=("cluster.local.", "10.in-addr.arpa."),
        kubeconfig="/etc/narthex/kubeconfig",
        namespaces=("shop", "billing"),
        labels=parse_selector("tier in (edge, front), !canary"),
        pods="verified",
        endpoint_pod_names=True,
        endpoints=False,
        ignore_empty_service=True,
        startup_timeout=10.0,
        fallthrough=(".",),
    )
    assert block.external == K8sExternalSettings(zones=("example.org.",), apex="ns", ttl=60, headless=True)
    assert block.log == (LogSettings(),) and block.debug
    assert block.reload == ReloadSettings(interval=10.0, jitter=5.0) and block.loadbalance == LoadBalanceSettings(
        limit=8
    )


def test_one_block_for_each_port():
    blocks = parse("example.org:1053 example.net dns://.:1053 {\n cache 10\n}", default_port=5300).blocks
    assert [(block.zones, block.port) for block in blocks] == [(("example.org.", "."), 1053), (("example.net.",), 5300)]
    assert all(sorted(block.cache.zones) == [".", "example.net.", "example.org."] for block in blocks)


@pytest.mark.parametrize(
    ("cidr", "zones"),
    [
        ("10.0.0.0/8", ["10.in-addr.arpa."]),
        ("10.0.0.0/9", [f"{each}.10.in-addr.arpa." for each in range(128)]),
        ("10.1.2.3/32", ["3.2.1.10.in-addr.arpa."]),
        ("10.1.2.77/24", ["2.1.10.in-addr.arpa."]),
        ("0.0.0.0/0", ["in-addr.arpa."]),
        ("2001:db8::/32", ["8.b.d.0.1.0.0.2.ip6.arpa."]),
        ("2001:db8::/31", ["8.b.d.0.1.0.0.2.ip6.arpa.", "9.b.d.0.1.0.0.2.ip6.arpa."]),
    ],
)
def test_networks_are_reverse_zones(cidr, zones):
    assert list(reverse_zones(cidr)) == zones
    if cidr != "0.0.0.0/0":
        (block,) = parse(f"{cidr}:53 {{\n}}").blocks
        assert list(block.zones) == zones


def test_words():
    text = """
    \ufeff. {
        log . "{a} \\" b # c" # comment
        health \\
            :81
        hosts {$DIR}/{%NAME%} {$ZONE} {
            1.2.3.4 {$HOST}#comment
        }
        errors {
            consolidate 1m "^fails
on two lines$"
        }
        prometheus :{$PORT}
    }
    """
    environment = {"DIR": "/x", "NAME": "y", "ZONE": "example.org", "HOST": "{", "PORT": "99"}
    with pytest.raises(CorefileError, match="zone"):
        parse(text.strip(), environment=environment | {"ZONE": "a b"})
    (block,) = parse(text.strip(), environment=environment).blocks
    assert block.log[0].format == '{a} " b # c'
    assert block.health.listen == HttpEndpoint("", 81)
    assert block.hosts.path == "/x/y" and block.hosts.zones == ("example.org.",)
    assert block.hosts.inline == ("1.2.3.4 {",), "what a variable holds is never syntax"
    assert block.errors.consolidate[0].pattern == "^fails\non two lines$"
    assert block.prometheus.listen.port == 99


@pytest.mark.parametrize(
    "text",
    [
        ".:53\nerrors\ncache 30 {\n denial 1000\n}\n",
        ".:53 {\n errors\n cache 30 {\n denial 1000\n }\n}",
        ".:53\n{\n errors\n cache 30 {\n denial 1000\n }\n}",
        "(a) {\n cache 30 {\n import b\n }\n}\n(b) {\n denial 1000\n}\n. {\n errors\n import a\n}",
    ],
)
def test_ways_to_write_the_same(text):
    (block,) = parse(text).blocks
    assert block.errors is not None and block.cache.denial == CacheBounds(capacity=1000, max_ttl=30)


def test_keys_go_on_behind_a_comma():
    (block,) = parse("example.org, example.net,\nexample.com {\n}").blocks
    assert block.zones == ("example.org.", "example.net.", "example.com.")


def test_imports():
    files = {
        "/etc/dns/custom/*.override": (
            ("/etc/dns/custom/a.override", "errors\n"),
            ("/etc/dns/custom/b.override", "loop\nforward . 1.1.1.1"),
        ),
        "/etc/dns/custom/*.server": (("/etc/dns/custom/x.server", "x.example {\n import more\n}"),),
        "/etc/dns/custom/more": (("/etc/dns/custom/more", "errors"),),
        "/etc/dns/none*": (),
    }
    text = ". {\n import custom/*.override\n import none*\n}\nimport custom/*.server"
    corefile = parse(text, "/etc/dns/Corefile", load=lambda pattern: files[pattern])
    root, other = corefile.blocks
    assert root.errors and root.loop and other.errors is not None
    assert other.where == CorefilePosition("/etc/dns/custom/x.server", 1)
    assert corefile.imported == tuple(
        f"/etc/dns/{name}" for name in ("custom/*.override", "none*", "custom/*.server", "custom/more")
    )
    assert [str(each) for each in corefile.problems] == [
        "/etc/dns/Corefile:3: warning: import 'none*': no file is named so"
    ]


@pytest.mark.parametrize("files", [{"a": (("a", "import a"),)}, {"a": (("a", "import b"),), "b": (("b", "import a"),)}])
def test_imports_in_a_circle(files):
    assert "circle" in faults(". {\n import a\n}", load=lambda pattern: files[pattern])[0]
    assert "circle" in faults("(x) {\n import y\n}\n(y) {\n import x\n}\n. {\n import x\n}")[0]


def test_all_faults_at_once_in_order():
    text = """\
quic://example.org {
    whatever 1
}
a.example {
    cache x@y {
        success many
        colour blue
    }
    forward . nowhere https://1.2.3.4 1.2.3.4:99999
    cache
    dnssec
}
b..example { }
c.example a.example {
    kubernetes {
        ttl 9999
        pods sometimes
        labels "a=(b"
        fallthrough a..b
    }
    health {
        lameduck soon
"""
    expected = [
        ("1", "'quic' is not supported; dns://, tls:// or https:// are"),
        ("2", "unknown plugin 'whatever'; known are acl, any,"),
        ("5", "cache: zone 'x@y' is neither"),
        ("6", "cache: success: 'many' is not a whole number"),
        ("7", "cache: unknown option 'colour'; known are success,"),
        ("9", "forward: 'nowhere' is neither an address nor"),
        ("9", "'https' is not supported"),
        ("9", "'99999' is not a port"),
        ("10", "cache: is there already, at Corefile:5"),
        ("11", "plugin 'dnssec' of CoreDNS is not supported: responses are not signed"),
        ("13", "{ must be a word of its own"),
        ("13", "stands outside of the braces of a server block"),
        ("14", "the { behind 'a.example' is never closed"),
        ("14", "zone a.example. on port 53 belongs to the server block at Corefile:4 already"),
        ("16", "kubernetes: ttl: '9999' is outside 0-3600"),
        ("17", "'sometimes' is unknown; known are disabled, insecure, verified"),
        ("18", "is not a label"),
        ("19", "'a..b' has an empty label"),
        ("21", "the { behind 'health' is never closed"),
        ("22", "lameduck: 'soon' is not a duration"),
    ]
    found = faults(text)
    for line, part in expected:
        assert any(fault.startswith(f"Corefile:{line}: error: ") and part in fault for fault in found), (
            line,
            part,
            found,
        )
    numbers = [int(fault.split(":")[1]) for fault in found]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("dnssec", "plugin 'dnssec' of CoreDNS is not supported: responses are not signed"),
        ("forward .", "takes at least 2 arguments, here are 1"),
        ("forward . 1.1.1.1 {\n tls a b c d\n}", "takes 0 to 3 arguments"),
        ("forward . 1.1.1.1 {\n policy best\n}", "known are random, round_robin, sequential"),
        ("forward . 1.1.1.1 {\n health_check 0.5s domain\n}", "'domain' is unknown"),
        ("forward . 1.1.1.1 {\n next OOPS\n}", "'OOPS' is not a response code"),
        ("forward 10.0.0.0/9 1.1.1.1", "stands for 128 zones"),
        ("forward . " + "1.1.1.1 " * 16, "16 upstreams are too many; 15 are allowed"),
        ("cache 0", "'0' is below 1"),
        ("cache {\n prefetch 1 1m 5%\n}", "'5' is outside 10-90"),
        ("cache {\n prefetch 1 1m 50\n}", "'50' is not a percentage"),
        ("cache {\n servfail 6m\n}", "'6m' is outside 0s to 5m0s"),
        ("cache {\n serve_stale 1h never\n}", "known are immediate and verify"),
        ("cache {\n disable all\n}", "known are success and denial"),
        ("kubernetes {\n zonal\n noendpoints\n}", "kubernetes: zonal and noendpoints exclude each other"),
        ("kubernetes cluster.local {\n multicluster clusterset.local\n}", "multicluster: is not supported; "),
        ("kubernetes {\n endpoint not-a-url\n}", "is not a URL"),
        ("kubernetes {\n namespaces a\n namespace_labels b=c\n}", "exclude each other"),
        ("kubernetes {\n ignore everything\n}", "known is empty_service"),
        ("kubernetes {\n tls a b c\n}", "tls: is not supported; name these files in a kubeconfig"),
        ("kubernetes {\n kubeconfig a b\n}", "make it the file's current-context"),
        ("k8s_external example.org", "needs plugin kubernetes"),
        ("autopath @kubernetes", "needs plugin kubernetes"),
        ("autopath @etcd", "known is @kubernetes"),
        ("hosts {\n gateway 1.2.3.4\n}", "is neither an option"),
        ("hosts {\n 1.2.3.4\n}", "nor an address with names"),
        ("health nowhere", "is not an address to listen on"),
        ("health :0", "is not an address to listen on"),
        ("ready {\n monitor always\n}", "known are until-ready and continuously"),
        ("prometheus {\n tls x\n}", "speaks plain HTTP"),
        ("loop now", "takes no argument"),
        ("loop {\n}", "takes no { }"),
        ("reload 1s", "is outside 2s to"),
        ("reload 10s 100ms", "below 1s"),
        ("loadbalance weighted x", "is not supported"),
        ("errors {\n consolidate 1m (\n}", "is not a regular expression"),
        ("errors {\n consolidate 1m x loud\n}", "'loud' is unknown"),
        ("log {\n class some\n}", "'some' is unknown"),
        ("bind", "takes at least 1 argument, here are 0"),
        ("import a b", "import takes one argument"),
        ("import /no/such", "there is no such snippet, either"),
        ("import a*b*c", "one * or ? is allowed"),
        ('log "', 'the " is never closed'),
        ("}", "} closes nothing"),
    ],
)
def test_faults(body, part):
    found = faults(". {\n" + body + "\n}")
    assert any(part in fault for fault in found), found


@pytest.mark.parametrize("text", ["", "# nothing\n", "import x*\n"])
def test_no_server_block(text):
    if text.startswith("import"):
        assert parse(text, load=lambda _: ()).blocks == ()
    else:
        assert faults(text) == ["Corefile:1: error: there is no server block"]


def test_warnings():
    text = ". {\n loop\n kubernetes\n autopath @kubernetes\n}\n"
    corefile = parse(text)
    assert [problem.severity for problem in corefile.problems] == ["warning", "warning"]
    assert "autopath @kubernetes does nothing without pods verified" in "".join(map(str, corefile.problems))
    tls = parse(". {\n forward . tls://9.9.9.9\n}")
    assert "no tls_servername" in str(tls.problems[0])
