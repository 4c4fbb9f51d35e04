"""The plugins that change queries and responses, as in CoreDNS."""

import dns.edns
import dns.flags
import pytest
from tests.dns.cluster import OBJECTS, code
from tests.dns.filtered import Filtered, shown

K8S = "kubernetes cluster.local"


def server(*lines, zones=".", world=True):
    block = "".join(f"    {line}\n" for line in (*lines, K8S, *(["forward . 192.0.2.53"] if world else [])))
    return Filtered(f"{zones} {{\n{block}}}\n", *OBJECTS)


WEB = "10.110.0.1"


@pytest.mark.parametrize(
    ("rule", "name", "type_", "answer"),
    [
        ("name shop.example web.shop.svc.cluster.local", "shop.example", "A", [f"shop.example. 5 A {WEB}"]),
        ("name exact shop.example web.shop.svc.cluster.local.", "Shop.Example", "A", [f"Shop.Example. 5 A {WEB}"]),
        ("name suffix .corp.example .svc.cluster.local", "web.shop.corp.example", "A", [f"web.shop.svc.cluster.local. 5 A {WEB}"]),
        ("name suffix .corp.example. .svc.cluster.local. answer auto", "web.shop.corp.example", "A",
         [f"web.shop.corp.example. 5 A {WEB}"]),
        ("name suffix .corp.example. .svc.cluster.local. answer auto", "_http._tcp.web.shop.corp.example", "SRV",
         ["_http._tcp.web.shop.corp.example. 5 SRV 0 100 80 web.shop.corp.example."]),
        ("name prefix old-web. web.", "old-web.shop.svc.cluster.local", "A", [f"web.shop.svc.cluster.local. 5 A {WEB}"]),
        ("name prefix old-web. web. answer auto", "old-web.shop.svc.cluster.local", "A",
         [f"old-web.shop.svc.cluster.local. 5 A {WEB}"]),
        ("name substring .store. .shop.", "web.store.svc.cluster.local", "A", [f"web.shop.svc.cluster.local. 5 A {WEB}"]),
        (r"name regex (.*)\.(.*)\.corp\.example {1}.{2}.svc.cluster.local", "web.shop.corp.example", "A",
         [f"web.shop.svc.cluster.local. 5 A {WEB}"]),
        (r"name regex (.*)\.corp\.example {1}.svc.cluster.local answer name (.*)\.svc\.cluster\.local {1}.corp.example",
         "web.shop.corp.example", "A", [f"web.shop.corp.example. 5 A {WEB}"]),
        (r"name regex (.*)\.corp\.example {1}.svc.cluster.local answer name (.*)\.svc\.cluster\.local {1}.corp.example "
         r"answer value (.*)\.svc\.cluster\.local {1}.corp.example", "_http._tcp.web.shop.corp.example", "SRV",
         ["_http._tcp.web.shop.corp.example. 5 SRV 0 100 80 web.shop.corp.example."]),
        (r"name regex (.*)\.corp\.example {1}.svc.cluster.local answer auto", "web.shop.corp.example", "A",
         [f"web.shop.corp.example. 5 A {WEB}"]),
        ("type ANY A", "www.example.org", "ANY", ["www.example.org. 300 A 192.0.2.1"]),
        ("ttl exact web.shop.svc.cluster.local 60", "web.shop.svc.cluster.local", "A", [f"web.shop.svc.cluster.local. 60 A {WEB}"]),
        ("ttl suffix .example.org -30", "www.example.org", "A", ["www.example.org. 30 A 192.0.2.1"]),
        ("ttl substring shop 10-", "web.shop.svc.cluster.local", "A", [f"web.shop.svc.cluster.local. 10 A {WEB}"]),
        ("ttl prefix www 10-20", "www.example.org", "A", ["www.example.org. 20 A 192.0.2.1"]),
        ("ttl regex ^w 7", "www.example.org", "A", ["www.example.org. 7 A 192.0.2.1"]),
        ("cname exact v4.example.org. www.example.org.", "alias.example.org", "A",
         ["alias.example.org. 300 CNAME www.example.org.", "www.example.org. 300 A 192.0.2.1"]),
        ("name exact shop.example www.example.org", "x.shop.example", "A", []),
    ],
)  # fmt: skip
def test_rewrite(rule, name, type_, answer):
    assert shown(server(f"rewrite {rule}").ask(name, type_).answer) == answer


def test_rewrite_rules_in_a_row():
    stops = server("rewrite name suffix .a. .b.", "rewrite name suffix .b. .example.org.")
    assert code(stops.ask("www.a")) == "NXDOMAIN"
    goes_on = server("rewrite continue name suffix .a. .b. answer auto", "rewrite stop name suffix .b. .example.org. answer auto",
                     "rewrite ttl suffix .a. 1")  # fmt: skip
    assert shown(goes_on.ask("www.a").answer) == ["www.a. 300 A 192.0.2.1"]
    assert goes_on.outside.asked == ["www.example.org. A"]
    both = server("rewrite continue ttl suffix .a. 9", "rewrite name suffix .a. .example.org. answer auto")
    assert shown(both.ask("www.a").answer) == ["www.a. 9 A 192.0.2.1"]


def test_rewrite_in_a_block():
    found = server(r"""rewrite stop {
        name regex (.*)\.corp\.example {1}.svc.cluster.local
        answer name (.*)\.svc\.cluster\.local {1}.corp.example
    }""")
    assert shown(found.ask("web.shop.corp.example").answer) == [f"web.shop.corp.example. 5 A {WEB}"]


def test_rewrite_class_and_rcode():
    assert code(server("rewrite class CH IN").ask("www.example.org", rdclass="CH")) == "NOERROR"
    assert code(server().ask("www.example.org", rdclass="CH")) == "REFUSED"
    assert code(server("rewrite rcode suffix .example.org. NXDOMAIN REFUSED").ask("nx.example.org")) == "REFUSED"


def test_a_rewritten_name_that_is_none_is_a_failure():
    found = server("rewrite name regex (.*)\\.long\\.example {1}{1}{1}{1}.example")
    assert code(found.ask("a" * 40 + ".long.example")) == "SERVFAIL"
    assert "has a label of 160 characters" in found.log[0]


def test_names_that_no_rule_concerns_are_answered_as_ever():
    found = server("rewrite name suffix .corp.example .svc.cluster.local", "template IN A internal {", "rcode NXDOMAIN", "}",
                   "acl secret.example {", "block", "}", "nsid", "any")  # fmt: skip
    assert found.kept("web.shop.svc.cluster.local") and found.kept("nx.shop.svc.cluster.local")
    assert not found.kept("web.shop.corp.example") and not found.kept("x.internal")


AZURE = r"""template ANY ANY internal.cloudapp.net {
        match "^(?:[^.]+\.){4,}internal\.cloudapp\.net\.$"
        rcode NXDOMAIN
        fallthrough
    }"""


@pytest.mark.parametrize(
    ("text", "name", "type_", "rcode", "answer"),
    [
        (AZURE, "a.b.c.d.internal.cloudapp.net", "A", "NXDOMAIN", []),
        (AZURE, "a.internal.cloudapp.net", "A", "NXDOMAIN", []),
        ("template IN A {\nanswer \"{{ .Name }} 60 IN A 192.0.2.9\"\n}", "x.example", "A", "NOERROR", ["x.example. 60 A 192.0.2.9"]),
        ("template IN A {\nanswer \"{{ .Name }} A 192.0.2.9\"\n}", "x.example", "A", "NOERROR", ["x.example. 3600 A 192.0.2.9"]),
        (r"""template IN A example {
            match ^ip-(?P<a>[0-9]*)-(?P<b>[0-9]*)-(?P<c>[0-9]*)-(?P<d>[0-9]*)[.]example[.]$
            answer "{{ .Name }} 60 IN A {{ .Group.a }}.{{ .Group.b }}.{{ index .Match 3 }}.{{ index .Group \"d\" }}"
        }""", "ip-10-1-2-3.example", "A", "NOERROR", ["ip-10-1-2-3.example. 60 A 10.1.2.3"]),
        (r"""template IN A example {
            match ^ip-([0-9a-f]{2})[.]example[.]$
            answer "{{ .Name }} 60 IN A 10.0.0.{{ parseInt .Group.1 16 8 }}"
        }""", "ip-1f.example", "A", "NOERROR", ["ip-1f.example. 60 A 10.0.0.31"]),
        ("template IN A example {\nmatch ^only[.]\nanswer \"{{ .Name }} A 192.0.2.9\"\n}", "x.example", "A", "SERVFAIL", []),
        ("template IN A example {\nmatch ^only[.]\nfallthrough\nanswer \"{{ .Name }} A 192.0.2.9\"\n}", "x.example", "A", "NXDOMAIN", []),
        ("template IN A example {\nanswer \"{{ .Name }} A 192.0.2.9\"\n}", "x.example", "AAAA", "NXDOMAIN", []),
        ("template IN ANY example {\nanswer \"{{ .Zone }} {{ .Type }} {{ .Class }}\"\n}", "x.example", "A", "SERVFAIL", []),
        ("template IN A {\nmatch (.*)\nanswer \"{{ .Name }} A {{ index .Match 7 }}\"\n}", "x.example", "A", "SERVFAIL", []),
        ("template IN MX {\nanswer \"{{ .Name }} 9 MX 10 {{ .Name }}\"\n}", "x.example", "MX", "NOERROR", ["x.example. 9 MX 10 x.example."]),
        ("template IN A x {\nanswer \"{{ .Name }} 60 IN CNAME www.example.org.\"\n}", "a.x", "A", "NOERROR",
         ["a.x. 60 CNAME www.example.org.", "www.example.org. 300 A 192.0.2.1"]),
    ],
)  # fmt: skip
def test_template(text, name, type_, rcode, answer):
    found = server(text).ask(name, type_)
    assert (code(found), shown(found.answer)) == (rcode, answer)


def test_a_template_in_three_sections():
    found = server("""template IN A x {
        answer "{{ .Name }} 1 IN A 192.0.2.1"
        additional "ns.x. 2 IN A 192.0.2.2"
        authority "x. 3 IN NS ns.x."
        ederror 21 "Not Supported"
    }""").ask("a.x", use_edns=0)
    assert [shown(part) for part in (found.answer, found.authority, found.additional)] == [
        ["a.x. 1 A 192.0.2.1"], ["x. 3 NS ns.x."], ["ns.x. 2 A 192.0.2.2"]
    ]  # fmt: skip
    assert [str(option) for option in found.options] == ["EDE 21 (Not Supported): Not Supported"]
    assert found.flags & dns.flags.AA


@pytest.mark.parametrize(
    ("rule", "client", "rcode"),
    [
        ("block type A net 10.0.0.0/8", "10.64.1.9", "REFUSED"),
        ("block type A net 10.0.0.0/8", "192.0.2.1", "NOERROR"),
        ("block type AAAA", "10.64.1.9", "NOERROR"),
        ("block", "fd00::1", "REFUSED"),
        ("block net 10.64.1.9 fd00::/8", "fd00::1", "REFUSED"),
        ("filter net *", "10.64.1.9", "empty"),
        ("drop net 10.64.1.9", "10.64.1.9", "none"),
        ("allow net 10.64.1.9\nblock", "10.64.1.9", "NOERROR"),
        ("allow net 10.64.1.9\nblock", "10.64.1.8", "REFUSED"),
    ],
)
def test_acl(rule, client, rcode):
    found = server("acl {", rule, "}").ask("web.shop.svc.cluster.local", client=client)
    said = "none" if found is None else code(found)
    assert (said if found is None or found.answer or said != "NOERROR" else "empty") == rcode


def test_an_acl_is_about_its_zones_and_says_why():
    found = server("acl secret.example {", "block", "}")
    assert code(found.ask("web.shop.svc.cluster.local")) == "NOERROR"
    refused = found.ask("x.secret.example", use_edns=0)
    assert [int(option.code) for option in refused.options] == [15]


def test_minimal():
    world = "www.example.org"
    assert [len(part) for part in (server().ask(world).authority, server().ask(world).additional)] == [1, 1]
    short = server("minimal").ask(world)
    assert (len(short.answer), short.authority, short.additional) == (1, [], [])
    assert server("minimal").ask("nx.shop.svc.cluster.local").authority


def test_any():
    found = server("any").ask("web.shop.svc.cluster.local", "ANY")
    assert shown(found.answer) == ['web.shop.svc.cluster.local. 8482 HINFO "ANY obsoleted" "See RFC 8482"']


@pytest.mark.parametrize(
    ("settings", "client", "name", "answer"),
    [
        ("dns64", "fd00::1", "v4.example.org", ["v4.example.org. 60 AAAA 64:ff9b::c000:204"]),
        ("dns64", "10.0.0.1", "v4.example.org", []),
        ("dns64 {\nallow_ipv4\n}", "10.0.0.1", "v4.example.org", ["v4.example.org. 60 AAAA 64:ff9b::c000:204"]),
        ("dns64 64:1337::/96", "fd00::1", "v4.example.org", ["v4.example.org. 60 AAAA 64:1337::c000:204"]),
        ("dns64 2001:db8::/32", "fd00::1", "v4.example.org", ["v4.example.org. 60 AAAA 2001:db8:c000:204::"]),
        ("dns64 2001:db8:122:344::/64", "fd00::1", "v4.example.org", ["v4.example.org. 60 AAAA 2001:db8:122:344:c0:2:400:0"]),
        ("dns64", "fd00::1", "www.example.org", ["www.example.org. 300 AAAA 2001:db8::1"]),
        ("dns64 {\ntranslate_all\n}", "fd00::1", "www.example.org", ["www.example.org. 60 AAAA 64:ff9b::c000:201"]),
        ("dns64", "fd00::1", "nx.example.org", []),
        ("dns64", "fd00::1", "web.shop.svc.cluster.local", ["web.shop.svc.cluster.local. 5 AAAA 64:ff9b::a6e:1"]),
    ],
)  # fmt: skip
def test_dns64(settings, client, name, answer):
    assert shown(server(settings).ask(name, "AAAA", client=client).answer) == answer


def test_header():
    flags = server("header {", "response set ra", "response clear aa rd", "}").ask("web.shop.svc.cluster.local").flags
    assert flags & dns.flags.RA and not flags & (dns.flags.AA | dns.flags.RD)
    cleared = server("header {", "query clear rd", "}").ask("web.shop.svc.cluster.local").flags
    assert not cleared & dns.flags.RD


def test_nsid():
    asked = [dns.edns.GenericOption(dns.edns.OptionType.NSID, b"")]
    found = server("nsid Use The Force").ask("web.shop.svc.cluster.local", use_edns=0, options=asked)
    assert [option.to_wire() for option in found.options] == [b"Use The Force"]
    assert not server("nsid x").ask("web.shop.svc.cluster.local", use_edns=0).options
    assert server("nsid").ask("web.shop.svc.cluster.local", use_edns=0, options=asked).options[0].to_wire()


@pytest.mark.parametrize(("client", "address"), [("10.1.2.3", "A 10.1.2.3"), ("fd00::3", "AAAA fd00::3")])
def test_whoami(client, address):
    found = server("whoami", world=False).ask("x.example", client=client)
    assert shown(found.additional) == [f"x.example. 0 {address}", "_udp.x.example. 0 SRV 0 0 4321 ."]
    assert shown(server("whoami").ask("web.shop.svc.cluster.local").answer) == [
        f"web.shop.svc.cluster.local. 5 A {WEB}"
    ]


def test_chaos():
    found = server("chaos 9.9 Ada Bob")
    assert shown(found.ask("version.bind", "TXT", rdclass="CH").answer) == ['version.bind. 0 TXT "9.9"']
    assert sorted(shown(found.ask("authors.bind", "TXT", rdclass="CH").answer)) == [
        'authors.bind. 0 TXT "Ada"', 'authors.bind. 0 TXT "Bob"'
    ]  # fmt: skip
    assert code(found.ask("other.bind", "TXT", rdclass="CH")) == "REFUSED"


def test_bufsize():
    many = "".join(f'answer "{{{{ .Name }}}} 60 IN A 10.0.0.{number}"\n' for number in range(60))
    for size, truncated in ((600, True), (4096, False)):
        found = server(f"bufsize {size}", "template IN A x {", many, "}").ask("a.x", use_edns=0, payload=4096)
        assert bool(found.flags & dns.flags.TC) is truncated
    assert not server("bufsize 600", "template IN A x {", many, "}").ask("a.x", transport="tcp").flags & dns.flags.TC


def test_lookups_in_a_circle_end():
    found = server("template IN A x {", 'answer "{{ .Name }} 60 IN CNAME y.x."', "}")
    assert len(found.ask("a.x").answer[0]) == 1
    assert found.log == ["y.x.: rules and records lead round in a circle"]


def test_order_of_the_plugins():
    """The rules see what the client asked, the access list what the rules made of it, and the template after it."""
    found = server("rewrite name suffix .old.example .new.example answer auto", "acl blocked.new.example {", "block", "}",
                   "template IN A new.example {", "answer \"{{ .Name }} 60 IN A 192.0.2.7\"", "}")  # fmt: skip
    assert shown(found.ask("a.old.example").answer) == ["a.old.example. 60 A 192.0.2.7"]
    assert code(found.ask("blocked.old.example")) == "REFUSED"
