"""Hostile texts for each parser of foreign text: a head that leads into one of its formats, then one word again and again.

The words of `WORDS` are tried behind each head, in one line and in many.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from narthex.cni import json as cni_json
from narthex.cni.errors import CniError
from narthex.cni.program.flannel import read_subnet_env
from narthex.dns.corefile import parse as corefile
from narthex.dns.plugins.hosts import parse_hosts
from narthex.dns.server.resolv_conf import parse_resolv_conf
from narthex.kube.access import Access, AccessError, open_connection
from narthex.lb import resources
from narthex.model.decode.objects import load
from narthex.model.lines import MAX_LINE
from narthex.model.net import IPFamily
from narthex.model.selector import parse_leniently
from narthex.netfilter.dump import kernel_trace
from narthex.netfilter.dump.read import read_dump
from narthex.netfilter.ipset import parse_ipsets
from narthex.netfilter.ipvs import parse_ipvsadm
from narthex.netfilter.nft.parse import parse_ruleset
from narthex.netfilter.xtables.parse import parse_rules, parse_save_text
from narthex.overlay import net_conf
from narthex.proxy.backends import leftovers
from narthex.runtime.configuration import file as configuration
from narthex.runtime.configuration.values import ClientConnection
from narthex.trace.issue.text import IssueTextError, is_issue_text, read_issue_text
from narthex.trace.node.layout import BundleManifest, read_table
from narthex.trace.node.network import ConntrackListing, listeners_of
from narthex.trace.node.routes import policy_lines, route_lines
from narthex.trace.node.view import settings_of, view_of_bundle, view_of_files
from narthex.trace.reports import counting

WORDS = (
    " ", "\t", '"', '\\"', "\\", "'", "a", "1", "0x1", ",", "{", "}", "[", "(", ")", "/*", "*/", "a ", "1 ", ". ", "a: ", "! ",
    "-", "- ", "-a ", "--a ", "#", ":", ";", "=", "a=1 ", "!", "*", "`", "@", "/", "reference", "é", "🦊",
)  # fmt: skip
"""Words that are repeated behind each head, without and with a line break behind each."""


class HostileText(NamedTuple):
    """A text of any length: a head, and a word that is repeated."""

    head: str
    word: str
    tail: str = ""
    each: str = ""
    """Begin of each line; the lines are as long as is allowed. Empty: the text is one line, or the word has its own breaks."""

    def of(self, size: int) -> str:
        """Return a text of about this many characters."""
        if not self.each:
            return self.head + self.word * (size // len(self.word)) + self.tail
        line = self.each + self.word * ((MAX_LINE - len(self.each) - 1) // len(self.word)) + "\n"
        return self.head + line * max(1, size // len(line)) + self.tail


class ForeignParser(NamedTuple):
    """A parser with the heads of its formats and further hostile texts."""

    parse: Callable[[str], object]
    heads: tuple[str, ...] = ("",)
    texts: tuple[HostileText, ...] = ()
    refuses: tuple[type[Exception], ...] = (ValueError,)
    """The documented errors."""


def _all(text: str) -> None:
    """Read a dump, with all rules, which are parsed on demand."""
    dump = read_dump(text)
    dump.check()
    for family in IPFamily:
        dump.for_family(family)


def _bundle(path: str) -> Callable[[str], None]:
    def parse(text: str) -> None:
        view = view_of_bundle({path: text}, BundleManifest(node="n", writer="w"), "bundle")
        for rules in (view.rules or {}).values():
            assert rules.unread is not None
        if view.connections is not None:
            for _ in view.connections.all():
                pass

    return parse


_ISSUE = "narthex-issue 1: narthex trace a b\n=== node n\n"


def _issue(text: str) -> None:
    if is_issue_text(text):
        with contextlib.suppress(IssueTextError):
            read_issue_text(text)


def _connections(text: str) -> None:
    listing = ConntrackListing(text)
    assert len(listing) >= 0
    for _ in listing.all():
        pass


def _counters(text: str) -> None:
    for source in (counting.of_iptables(text), counting.of_nft(text, {}), counting.of_ipvs(text, {})):
        for _ in source:
            pass


def kubeconfig_parser(directory: Any) -> Callable[[str], None]:
    def parse(text: str) -> None:
        path = directory / "kubeconfig"
        path.write_text(text)
        open_connection(Access(connection=ClientConnection(kubeconfig=str(path))))

    return parse


def _json_list(*words: str) -> tuple[HostileText, ...]:
    """Return lists of JSON with one entry again and again."""
    return tuple(HostileText("[", f"{word},", "null]") for word in words)


_LISTING = "Chain X (1 references)\ntarget     prot opt source               destination\n"
_LISTED = f"{_LISTING}ACCEPT     tcp  --  0.0.0.0/0            0.0.0.0/0            "
_SAVED = "*nat\n:A - [0:0]\n-A A "
_NFT = "table ip a {\n\tchain b {\n\t\t"
_NFT_LOOSE = "table ip a { chain b { "
_SERVICE = "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec:\n  clusterIP: 10.0.0.1\n  ports:\n"
_SLICE = '{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"a"},"addressType":"IPv4",'

PARSERS: dict[str, ForeignParser] = {
    "rule dumps": ForeignParser(
        _all,
        (
            "",
            _LISTED,
            _LISTED + "/* ",
            "Chain X (",
            "Chain X (policy ",
            "# ",
            "root@a:~# iptables -L ",
            "-A A ",
            "Name: a\nType: b\n",
            "TCP  10.0.0.1:80 rr ",
            "create a hash:ip ",
            "create a hash:ip family inet\nadd a ",
        ),
        (
            HostileText(_LISTED, "/* ", each="ACCEPT tcp -- 0.0.0.0/0 0.0.0.0/0 "),
            HostileText(_LISTED, "x tcp "),
            HostileText(_LISTED, "x /* ", "*/"),
            HostileText(_LISTED.replace("ACCEPT", "LOG   "), "prefix `"),
            HostileText(_LISTED, "ADDRTYPE match dst-type "),
            HostileText(_LISTED, "match-set a "),
            HostileText("", _LISTED + "\n\n"),
            HostileText("", "Chain X (1 references)\n"),
            HostileText("Chain X (", "reference"),
            HostileText(_LISTING, "(omitted "),
            HostileText(_LISTING, ".", "x"),
            HostileText("Name: a\nType: hash:ip\n", "Header: family inet\n"),
            HostileText("", "Name: a\nType: hash:ip\nMembers:\n10.0.0.1\n"),
            HostileText("TCP  10.0.0.1:80 rr\n", "  -> 10.0.0.2:80 Masq 1 0 0\n"),
            HostileText("", "*nat\n"),
            HostileText("", "*nat\nCOMMIT\n"),
            HostileText("", "-A KUBE-A -j KUBE-B\n"),
            HostileText("", "-A A --ctstate NEW "),
            HostileText("", "-N A\n"),
            HostileText("", "[0:0] -A A -j B\n"),
            HostileText("", "create a hash:ip family inet\n"),
            HostileText("", "-A -t 10.0.0.1:80 -s rr\n"),
        ),
    ),
    "iptables-save": ForeignParser(
        _all,
        (
            _SAVED,
            _SAVED + "-m comment --comment ",
            _SAVED + '-m comment --comment "',
            _SAVED + "-m tcp ",
            _SAVED + "-m multiport --dports ",
            _SAVED + "-j DNAT ",
            "*nat\n:",
            "*nat\n[0:0] ",
        ),
        (
            HostileText(_SAVED, "-m foo -j X\n-A A "),
            HostileText(_SAVED, "-m foo -j X\n-A A ", "\nCOMMIT\n"),
            HostileText(_SAVED, "-m foo "),
            HostileText(_SAVED, "! -s "),
            HostileText(_SAVED, "-m iprange --src-range ::1-ffff::fffe "),
            HostileText(_SAVED, "-m statistic --mode random --probability 1e-999999999 "),
            HostileText("*nat\n", ":A - [0:0]\n"),
            HostileText("*nat\n", "x\n"),
            HostileText("*nat\n", '-A A "\n'),
            HostileText("*nat\n", '\\"', "\nCOMMIT\n", each='-A A -m comment --comment "'),
            HostileText("*nat\n", "-A A -j B\n-A B -j A\n"),
        ),
    ),
    "saved rules": ForeignParser(
        lambda text: parse_save_text(text, IPFamily.IPV4), (_SAVED,), (HostileText("", "*nat\nCOMMIT\n"),)
    ),
    "grepped rules": ForeignParser(lambda text: parse_rules(text, IPFamily.IPV4), ("-A A ",)),
    "leftovers": ForeignParser(lambda text: leftovers.find(text, IPFamily.IPV4, kubelet=True), (_SAVED,)),
    "nft": ForeignParser(
        _all,
        (
            _NFT,
            _NFT_LOOSE,
            _NFT + "ip daddr { ",
            _NFT + "numgen random mod 9999999 vmap { ",
            "table ip a {\n\tset b {\n\t\ttype ipv4_addr\n\t\telements = { ",
            "table ip a {\n\tmap b {\n\t\ttypeof ip daddr . th dport : verdict\n\t\telements = { ",
        ),
        (
            HostileText("table ip a {\n", "chain a { accept }\n"),
            HostileText("table ip a { ", "chain a { accept } "),
            HostileText("", "table ip a {\n}\n"),
            HostileText("", "table ip a { chain b { accept } }\n"),
            HostileText("", "\t\ttable ip a {\n"),
            HostileText("table ip a {\n", "\tchain b {\n\t}\n"),
            HostileText(_NFT, "dnat to numgen "),
            HostileText(_NFT, "fib daddr type accept, "),
            HostileText(_NFT, "ct state vmap { "),
            HostileText(_NFT, "ip daddr . "),
            HostileText(_NFT, "meta mark 1/-99999999 "),
            HostileText(_NFT, "foo accept "),
            HostileText(_NFT, "foo\n\t\t", "\n\t}\n}\n"),
            HostileText(_NFT, "counter packets 1 bytes 1 "),
            HostileText(
                "table ip a {\n\tset b {\n\t\ttype ipv6_addr . ipv6_addr\n\t\telements = { ",
                "::1-ffff::fffe . ::1-ffff::fffe, ",
            ),
            HostileText(
                "table ip a {\n\tset b {\n\t\ttype ipv6_addr\n\t\tflags interval\n\t\telements = { ",
                "::1-::fffe, ",
                "::2 }\n\t}\n}\n",
            ),
        ),
    ),
    "nft scripts": ForeignParser(
        parse_ruleset,
        ("table ip a { ",),
        (HostileText("", "table ip a { chain b { accept } }\n"), HostileText("table ip a { ", "chain b { accept } ")),
    ),
    "nft in JSON": ForeignParser(
        _all,
        (
            '{"nftables": [',
            '{"nftables": [{"table": {"family": "ip", "name": "a"}}, {"rule": {"family": "ip", "table": "a", "chain": "b", "expr": [',
        ),
        (
            HostileText('{"nftables": [', '{"rule": 1},', "{}]}"),
            HostileText('{"nftables": [', '{"chain": {"family": "ip", "table": "a", "name": "b"}},', "{}]}"),
            HostileText(
                '{"nftables": [', '{"rule": {"family": "ip", "table": "a", "chain": "b", "expr": [{"x": 1}]}},', "{}]}"
            ),
        ),
    ),
    "ipset save": ForeignParser(
        parse_ipsets,
        ("create a hash:ip ", "create a hash:ip family inet\nadd a "),
        (
            HostileText("create a hash:ip family inet\n", "add a 10.0.0.1\n"),
            HostileText("", "create a hash:ip family inet\n"),
        ),
    ),
    "issue texts": ForeignParser(
        _issue,
        (
            "narthex-issue 1: narthex trace a b",
            f"{_ISSUE}=== part rules/nft.txt\n",
            f"{_ISSUE}=== failed rules/nft.txt ",
            "> > ",
        ),
        (
            HostileText(_ISSUE, "=== node n\n"),
            HostileText(f"{_ISSUE}=== part rules/nft.txt\n", " === end\n"),
            HostileText("", "narthex-issue "),
            HostileText("", "> "),
            HostileText("narthex-issue 1: narthex trace a b ", "--node-ip 10.0.0.1 "),
        ),
    ),
    "ipvsadm -S": ForeignParser(
        parse_ipvsadm,
        ("-A -t 10.0.0.1:80 ",),
        (HostileText("-A -t 10.0.0.1:80 -s rr\n", "-a -t 10.0.0.1:80 -r 10.0.0.2:80 -m\n"),),
    ),
    "kernel traces": ForeignParser(
        lambda text: kernel_trace.parse(text.splitlines()),
        (
            "trace id 1 ip a b ",
            "trace id 1 ip a b packet: ",
            "trace id 1 ip a b rule ",
            "PACKET: 2 1 ",
            "x TRACE: a:b:rule:1 ",
        ),
        (
            HostileText("trace id 1 ip a b packet: ", 'iif "'),
            HostileText("", "trace id 1 ip a b rule x (verdict accept)\n"),
            HostileText("", "TRACE: "),
            HostileText("x TRACE: a:b:rule:1 ", "A="),
            HostileText("trace id 1 ip a b rule ", " # handle 1"),
        ),
    ),
    "routes": ForeignParser(
        lambda text: (route_lines(text), policy_lines(text)),
        ("", "10.0.0.0/8 ", "default via ", "0: from "),
        (
            HostileText("default ", "nexthop via fe80::1 dev a "),
            HostileText("", "2001:db8::/64 via fe80::1 dev a metric 1\n"),
            HostileText("default\n", "  nexthop via 10.0.0.1 dev a\n"),
            HostileText("1:", "\n"),
            HostileText("", "1:\n"),
        ),
    ),
    "sockets": ForeignParser(listeners_of, ("", "tcp LISTEN 0 0 ")),
    "connections": ForeignParser(
        _connections,
        ("", "tcp 6 ", "ipv4 2 tcp 6 1 ESTABLISHED src="),
        (
            HostileText(
                "",
                "tcp      6 1 ESTABLISHED src=10.0.0.1 dst=10.0.0.2 sport=1 dport=2 src=10.0.0.2 dst=10.0.0.1 sport=2 dport=1\n",
            ),
            HostileText("", "tcp\n"),
            HostileText("tcp 6 ", "src=10.0.0.1 "),
        ),
    ),
    "settings": ForeignParser(settings_of, ("net.", "net.a = ")),
    "counters": ForeignParser(
        _counters,
        ("*nat\n[1:1] -A KUBE-SEP-A ", "\tmap a {\n", "TCP  10.0.0.1:80 1\n  -> "),
        (
            HostileText("", "*nat\n"),
            HostileText("", "\tmap a {\n"),
            HostileText("*nat\n[1:1] -A KUBE-SEP-A ", "-j DNAT ", "\nCOMMIT\n"),
            HostileText("\tmap a {\n", "a", "\n\t}\n"),
            HostileText("\tmap a {\n", "a . ", "\n\t}\n"),
            HostileText("*nat\n[1:1] -A KUBE-SVC-A ", '--comment "', "\nCOMMIT\n"),
        ),
    ),
    "bundle tables": ForeignParser(
        read_table, ("format\t1\t",), (HostileText("format\t1\ta\tb\n", "taken\tx\ty\tz\n"),)
    ),
    **{
        f"bundle {path}": ForeignParser(_bundle(path), ("",), texts)
        for path, texts in {
            "rules/iptables-nft.txt": (HostileText("", "-A A -j B\n"),),
            "net/links.json": _json_list("{}", '{"ifname":"a"}', "1"),
            "net/addresses.json": _json_list('{"ifname":"a","addr_info":[{"local":"10.0.0.1","prefixlen":8}]}'),
            "net/routes-4.json": _json_list('{"dst":"default","gateway":"10.0.0.1"}'),
            "net/routes-6.json": _json_list('{"dst":"2001:db8::/64","gateway":"fe80::1","dev":"a"}'),
            "net/policies-4.json": _json_list('{"priority":1,"src":"all"}'),
            "net/listeners.txt": (HostileText("", "tcp LISTEN 0 0 10.0.0.1:80 *:*\n"),),
            "net/conntrack-4.txt": (),
            "net/sysctls.txt": (HostileText("", "net.a = 1\n"),),
        }.items()
    },
    "files of a node": ForeignParser(
        lambda text: view_of_files([("a", text)]),
        ("", "net.ipv4.ip_forward = ", "default via 10.0.0.1\n", "["),
        _json_list('{"dst":"default","gateway":"10.0.0.1"}', "[]"),
    ),
    "manifests": ForeignParser(
        lambda text: load(text.encode(), "a.yaml"),
        ("", "a: ", "a:\n  - ", _SERVICE, _SERVICE + "  - port: ", "{", '{"a": "', '[{"a": ', "apiVersion: v1\nkind: "),
        (
            HostileText("", '{"a":1}'),
            HostileText("", '{"a":1}\n'),
            HostileText("", "a: 1\n---\n"),
            HostileText("", "---\n"),
            HostileText("", "&a [*a]\n---\n"),
            HostileText("a: &a [1]\nb: [", "*a,", "]\n"),
            HostileText("", "? "),
            HostileText("", "!!a "),
            HostileText("", "|\n "),
            HostileText("a: |\n", "\n"),
            HostileText("a: ", "x\n  "),
            HostileText("", "%a\n"),
            HostileText("", '"\\\n'),
            HostileText(_SERVICE, "  - port: 80\n"),
            HostileText(_SERVICE, "  - {port: 0, name: A}\n"),
            HostileText(
                "apiVersion: v1\nkind: List\nitems:\n", "- {apiVersion: v1, kind: Service, metadata: {name: A}}\n"
            ),
            HostileText(
                "apiVersion: v1\nkind: List\nitems:\n",
                "- {apiVersion: v1, kind: Service, metadata: {name: a}, spec: {}}\n",
            ),
            HostileText(_SLICE + '"endpoints":[', '{"addresses":["10.0.0.1"]},', '{"addresses":["x"]}]}'),
            HostileText(_SLICE + '"endpoints":[{"addresses":[', '"10.0.0.1",', '"x"]}]}'),
            HostileText(_SLICE + '"ports":[', '{"port":1,"name":"a"},', "{}]}"),
            HostileText("apiVersion: v1\nkind: Service\nmetadata:\n  name: a\n  labels: {", "a: b, ", "}\n"),
            HostileText(
                "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {externalIPs: [", "10.0.0.1, ", "x]}\n"
            ),
            HostileText(
                "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {loadBalancerSourceRanges: [",
                "10.0.0.0/8, ",
                "x]}\n",
            ),
            HostileText("apiVersion: v1\nkind: Node\nmetadata: {name: a}\nspec: {podCIDRs: [", "10.0.0.0/8, ", "x]}\n"),
            HostileText(
                "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: [",
                "{name: a, ports: [{containerPort: 1}]}, ",
                "]}\n",
            ),
        ),
    ),
    "pools": ForeignParser(
        lambda text: resources.read(text.encode(), "a.yaml"),
        ("", "apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {name: a}\nspec: {addresses: ["),
        (
            HostileText(
                "apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {name: a}\nspec: {addresses: [",
                "10.0.0.1-10.0.0.3, ",
                "x]}\n",
            ),
        ),
    ),
    "configuration": ForeignParser(
        lambda text: configuration.parse(text.encode(), "a.yaml"),
        (
            "",
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n",
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nclusterCIDR: ",
        ),
        (
            HostileText("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n", "mode: a\n"),
            HostileText(
                "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nnodePortAddresses: [",
                "a, ",
                "]\n",
            ),
        ),
    ),
    "kubeconfig": ForeignParser(
        str.encode,  # Replaced by the fixture, which has a directory.
        ("", "clusters: ["),
        (HostileText("clusters: [", "{name: a, cluster: {server: 'http://a'}}, ", "]\n"),),
        (AccessError,),
    ),
    "Corefile": ForeignParser(
        corefile.parse,
        ("", ". {\n", ". {\n  forward . ", ". {\n  hosts {\n", '. {\n  log "', ". {\n kubernetes "),
        (
            HostileText("", "a {\n}\n"),
            HostileText("", "a {\n"),
            HostileText("", "a,\n"),
            HostileText("", "0.0.0.0/1 "),
            HostileText(". {\n", "cache 30\n"),
            HostileText(". {\n", "foo\n"),
            HostileText(". {\n", "log\n", "}\n"),
            HostileText(". {\n", "bind 10.0.0.1\n", "}\n"),
            HostileText(". {\n errors {\n", "consolidate 1s a\n", "}\n}\n"),
            HostileText(". {\n cache {\n", "success 1\n", "}\n}\n"),
            HostileText(". {\n forward . 10.0.0.1 {\n", "except a\n", "}\n}\n"),
            HostileText(". {\n kubernetes a {\n", "namespaces a\n", "}\n}\n"),
            HostileText(". {\n hosts {\n", "10.0.0.1 a\n", "}\n}\n"),
            HostileText("(a) {\n  log\n}\n. {\n", "import a\n", "}\n"),
            HostileText(". {\n forward . ", "10.0.0.1 ", "\n}\n"),
            HostileText(". {\n", "{$A} "),
            HostileText(". {\n rewrite name regex ", "(a*)*"),
            HostileText("", "a}\n"),
        ),
    ),
    "hosts": ForeignParser(
        lambda text: parse_hosts(text.splitlines()),
        ("", "10.0.0.1 ", "::1 "),
        (HostileText("", "10.0.0.1 a b\n"), HostileText("10.0.0.1 ", "a ")),
    ),
    "resolv.conf": ForeignParser(
        parse_resolv_conf, ("nameserver ", "search ", "options "), (HostileText("", "nameserver 10.0.0.1\n"),)
    ),
    "CNI configuration": ForeignParser(
        lambda text: cni_json.parse(text.encode()),
        ("", "{", '{"a": ', '{"a": "', "["),
        (
            HostileText('"', "\\n", '"'),
            HostileText('"', "\\u0041", '"'),
            HostileText("[", '"a",', "1]"),
            HostileText("{", '"a":1,', "}"),
        ),
    ),
    "subnet.env": ForeignParser(
        lambda text: read_subnet_env(text, "a"), ("",), (HostileText("", "A=1\n"),), (CniError,)
    ),
    "net-conf.json": ForeignParser(
        lambda text: net_conf.parse(text.encode(), "a"), ("", '{"Network": "'), (HostileText("[", "1,", "1]"),)
    ),
    "selectors": ForeignParser(
        lambda text: list(parse_leniently(text)),
        ("", "a ", "a in (", "! "),
        (HostileText("", "a,"), HostileText("a", " ", "x"), HostileText("", "a in (b),")),
    ),
}


def hostile_texts(parser: ForeignParser) -> Iterator[HostileText]:
    """Yield the texts of a parser, and each word behind each of its heads: in one line, one a line, and in many long lines."""
    yield from parser.texts
    for head, word in itertools.product(parser.heads, WORDS):
        yield HostileText(head, word)
        yield HostileText(head, f"{word}\n")
    yield from (HostileText("", f"{head}{word}\n") for head, word in itertools.product(parser.heads, ('"', "a", "x y")))
