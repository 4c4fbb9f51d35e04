"""The search list walked in the server (row S18)."""

import dns.message
import pytest
from tests.dns.cluster import OBJECTS, Served

from narthex.dns.corefile.settings import Autopath
from narthex.dns.dispatcher import Ask, Block, Desk, Made
from narthex.dns.interfaces import Client
from narthex.dns.message import names, wire
from narthex.dns.message.response import made
from narthex.dns.plugins.autopath import search_list, steps
from narthex.dns.program.autopath import AutopathResolver, listed
from narthex.dns.program.elsewhere import Elsewhere
from narthex.dns.server.tally import Tally
from narthex.model.objects import Pod

pytestmark = pytest.mark.row("S18")

POD = "10.64.1.10"
SHARED = "192.168.0.1"
HOSTS = (
    Pod(name="host", namespace="shop", phase="Running", ips=(SHARED,)),
    Pod(name="host", namespace="kube-system", phase="Running", ips=(SHARED,)),
)


class Outside:
    """Knows `known.example` and nothing else."""

    def __init__(self):
        self.asked = []

    def ask(self, query, client, reply, now):
        name = names.text(query.name)
        self.asked.append(name)
        assert client.address and now == 7.0
        if name == "known.example.":
            reply(made(query, wire.NOERROR, [(wire.A, 60, b"\1\2\3\4")] if query.qtype == wire.A else []))
        elif name == "broken.":
            reply(made(query, wire.SERVFAIL))
        else:
            reply(made(query, wire.NXDOMAIN))


class Walker(Served):
    """A served cluster with autopath in front."""

    def __init__(self, search=("node.example.",), path="", pods="verified"):
        super().__init__(*OBJECTS, *HOSTS, pods=pods, fallthrough=("in-addr.arpa.",))
        self.outside = Outside()
        cluster = self.desk._by_zone[names.wire("cluster.local")][0].cluster
        self.walked = []
        given = Autopath(zones=(".",), path=path)
        searcher = AutopathResolver(given, cluster, self.outside, search, lambda: self.walked.append(1))
        self.desk = Desk([Block((".",), cluster, self.outside, searcher)])

    def walk(self, name, type_="A", client=POD):
        query = dns.message.make_query(name, type_)
        handled = self.desk.handle(query.to_wire(), "udp")
        if isinstance(handled, Made):
            return dns.message.from_wire(query.to_wire()[:2] + handled.compiled.tail), False
        assert isinstance(handled, Ask)
        told = []
        handled.resolver.ask(handled.query, Client(client), told.append, 7.0)
        (data,) = told
        message = dns.message.from_wire(data)
        assert message.id == query.id and message.question == query.question
        return message, True


def lines(message):
    return [line for each in message.answer for line in each.to_text().split("\n")]


def test_steps():
    zone = names.wire("cluster.local")
    search = search_list(names.wire("shop")[:-1], zone, [names.wire("node.example")])
    assert [names.text(each) for each in search] == [
        "shop.svc.cluster.local.",
        "svc.cluster.local.",
        "cluster.local.",
        "node.example.",
    ]
    tried = steps(names.wire("a.b.shop.svc.cluster.local"), search)
    assert [names.text(each) for each in tried] == [
        "a.b.svc.cluster.local.",
        "a.b.cluster.local.",
        "a.b.node.example.",
        "a.b.",
    ]
    for name in ("shop.svc.cluster.local", "a.other.svc.cluster.local", "xshop.svc.cluster.local"):
        assert steps(names.wire(name), search) == ()
    long = names.wire(".".join(["a" * 60] * 3 + ["b" * 40]))
    assert all(len(each) <= 255 for each in steps(long[:-1] + search[0], (*search[:1], long)))


@pytest.mark.parametrize(
    ("name", "target", "address"),
    [
        ("kube-dns.kube-system.shop.svc.cluster.local", "kube-dns.kube-system.svc.cluster.local.", "10.110.0.10"),
        ("web.shop.svc.SHOP.svc.cluster.local", "web.shop.svc.cluster.local.", "10.110.0.1"),
        ("web.shop.svc.cluster.local.shop.svc.cluster.local", "web.shop.svc.cluster.local.", "10.110.0.1"),
        ("known.example.shop.svc.cluster.local", "known.example.", "1.2.3.4"),
    ],
)
def test_the_first_name_that_exists_answers_behind_a_cname(name, target, address):
    walker = Walker()
    message, asked = walker.walk(name)
    assert asked and message.rcode() == 0 and walker.walked == [1]
    first, second = lines(message)
    ttl = first.split()[1]
    assert first == f"{name}. {ttl} IN CNAME {target}"
    assert second == f"{target} {ttl} IN A {address}"


def test_a_name_without_the_family_ends_the_walk():
    message, _ = Walker().walk("kube-dns.kube-system.shop.svc.cluster.local", "AAAA")
    assert message.rcode() == 0 and len(lines(message)) == 1


def test_when_nothing_exists_the_answer_is_the_usual_one():
    walker = Walker()
    message, asked = walker.walk("nope.example.shop.svc.cluster.local")
    assert asked and message.rcode() == 3 and message.authority and not message.answer
    assert walker.outside.asked == ["nope.example.node.example.", "nope.example."] and not walker.walked


def test_a_failure_ends_the_walk():
    walker = Walker(search=())
    message, _ = walker.walk("broken.shop.svc.cluster.local")
    assert message.rcode() == 3 and walker.outside.asked == ["broken."]


@pytest.mark.parametrize("client", ["10.64.9.9", "10.64.1.50", SHARED, "fd00::9"])
def test_clients_that_are_no_known_pod_get_the_usual_answer(client):
    walker = Walker()
    message, _ = walker.walk("kube-dns.kube-system.shop.svc.cluster.local", client=client)
    assert message.rcode() == 3 and not walker.outside.asked


def test_another_namespaces_names_are_left_alone():
    message, _ = Walker().walk("web.shop.kube-system.svc.cluster.local")
    assert message.rcode() == 3


def test_without_verified_pods_nothing_is_known():
    assert Walker(pods="insecure").walk("kube-dns.kube-system.shop.svc.cluster.local")[0].rcode() == 3


@pytest.mark.parametrize("type_", ["SRV", "TXT", "MX"])
def test_only_addresses_are_searched_for(type_):
    message, asked = Walker().walk("kube-dns.kube-system.shop.svc.cluster.local", type_)
    assert not asked and message.rcode() == 3


def test_who_may_not_ask_others_hears_that_there_is_no_such_name():
    walker = Walker()
    query = dns.message.make_query("known.example.shop.svc.cluster.local", "A")
    ask = walker.desk.handle(query.to_wire(), "udp")
    assert isinstance(ask, Ask)
    tally, told = Tally(lambda: None), []
    Elsewhere(("192.0.2.0/24",), tally, lambda: 7.0)(ask, Client(POD), told.append)
    (said,) = map(dns.message.from_wire, told)
    assert said.id == query.id and said.rcode() == 3 and said.authority and not walker.outside.asked
    assert tally.take().answers == {("udp", 1, ".", "A", "NXDOMAIN", "kubernetes"): 1}


def test_names_that_exist_are_answered_at_once():
    message, asked = Walker().walk("web.shop.svc.cluster.local")
    assert not asked and message.rcode() == 0


def test_a_list_out_of_a_file(tmp_path):
    path = tmp_path / "resolv.conf"
    path.write_text("search corp.cluster.local svc.cluster.local\n")
    said = []
    assert listed(Autopath(zones=(".",), path=str(path)), said.append) == ("corp.cluster.local.", "svc.cluster.local.")
    walker = Walker(search=("corp.cluster.local.", "svc.cluster.local."), path=str(path))
    message, _ = walker.walk("web.shop.corp.cluster.local", client="203.0.113.1")
    assert lines(message)[1].endswith("A 10.110.0.1")
    assert (
        listed(Autopath(zones=(".",), path=str(tmp_path / "none")), said.append) == () and "cannot be read" in said[0]
    )
