"""The search list walked in the server (row S18)."""

import dns.message
import pytest
from tests.dns.cluster import OBJECTS, Served

from narthex.dns.corefile.settings import AutopathSettings
from narthex.dns.message import names, wire
from narthex.dns.message.query import DnsClient
from narthex.dns.message.response import local_response
from narthex.dns.plugins.autopath import AutopathPlugin, pod_search_path, search_candidates
from narthex.dns.server.counters import AnswerCounter
from narthex.dns.server.dispatcher import BlockPlugins, Dispatcher, LocalAnswer, PendingQuery, Recursion
from narthex.dns.server.resolv_conf import autopath_search_list
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

    def resolve(self, query, client, reply, now):
        name = names.text(query.name)
        self.asked.append(name)
        assert client.address and now == 7.0
        if name == "known.example.":
            reply(local_response(query, wire.NOERROR, [(wire.A, 60, b"\1\2\3\4")] if query.qtype == wire.A else []))
        elif name == "broken.":
            reply(local_response(query, wire.SERVFAIL))
        else:
            reply(local_response(query, wire.NXDOMAIN))


class Walker(Served):
    """A served cluster with autopath in front."""

    def __init__(self, search=("node.example.",), path="", pods="verified"):
        super().__init__(*OBJECTS, *HOSTS, pods=pods, fallthrough=("in-addr.arpa.",))
        self.external = Outside()
        cluster = self.dispatcher._by_zone[names.wire("cluster.local")][0].kubernetes
        self.walked = []
        given = AutopathSettings(zones=(".",), path=path)
        searcher = AutopathPlugin(given, cluster, self.external, search, lambda: self.walked.append(1))
        self.dispatcher = Dispatcher([BlockPlugins((".",), cluster, self.external, searcher)])

    def walk(self, name, type_="A", client=POD):
        query = dns.message.make_query(name, type_)
        handled = self.dispatcher.handle(query.to_wire(), "udp")
        if isinstance(handled, LocalAnswer):
            return dns.message.from_wire(query.to_wire()[:2] + handled.response.tail), False
        assert isinstance(handled, PendingQuery)
        told = []
        handled.resolver.resolve(handled.query, DnsClient(client), told.append, 7.0)
        (data,) = told
        message = dns.message.from_wire(data)
        assert message.id == query.id and message.question == query.question
        return message, True


def lines(message):
    return [line for each in message.answer for line in each.to_text().split("\n")]


def test_steps():
    zone = names.wire("cluster.local")
    search = pod_search_path(names.wire("shop")[:-1], zone, [names.wire("node.example")])
    assert [names.text(each) for each in search] == [
        "shop.svc.cluster.local.",
        "svc.cluster.local.",
        "cluster.local.",
        "node.example.",
    ]
    tried = search_candidates(names.wire("a.b.shop.svc.cluster.local"), search)
    assert [names.text(each) for each in tried] == [
        "a.b.svc.cluster.local.",
        "a.b.cluster.local.",
        "a.b.node.example.",
        "a.b.",
    ]
    for name in ("shop.svc.cluster.local", "a.other.svc.cluster.local", "xshop.svc.cluster.local"):
        assert search_candidates(names.wire(name), search) == ()
    long = names.wire(".".join(["a" * 60] * 3 + ["b" * 40]))
    assert all(len(each) <= 255 for each in search_candidates(long[:-1] + search[0], (*search[:1], long)))


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
    assert walker.external.asked == ["nope.example.node.example.", "nope.example."] and not walker.walked


def test_a_failure_ends_the_walk():
    walker = Walker(search=())
    message, _ = walker.walk("broken.shop.svc.cluster.local")
    assert message.rcode() == 3 and walker.external.asked == ["broken."]


@pytest.mark.parametrize("client", ["10.64.9.9", "10.64.1.50", SHARED, "fd00::9"])
def test_clients_that_are_no_known_pod_get_the_usual_answer(client):
    walker = Walker()
    message, _ = walker.walk("kube-dns.kube-system.shop.svc.cluster.local", client=client)
    assert message.rcode() == 3 and not walker.external.asked


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
    ask = walker.dispatcher.handle(query.to_wire(), "udp")
    assert isinstance(ask, PendingQuery)
    tally, told = AnswerCounter(lambda: None), []
    Recursion(("192.0.2.0/24",), tally, lambda: 7.0).resolve(ask, DnsClient(POD), told.append)
    (said,) = map(dns.message.from_wire, told)
    assert said.id == query.id and said.rcode() == 3 and said.authority and not walker.external.asked
    assert tally.take().answers == {("udp", 1, ".", "A", "NXDOMAIN", "kubernetes"): 1}


def test_names_that_exist_are_answered_at_once():
    message, asked = Walker().walk("web.shop.svc.cluster.local")
    assert not asked and message.rcode() == 0


def test_a_list_out_of_a_file(tmp_path):
    path = tmp_path / "resolv.conf"
    path.write_text("search corp.cluster.local svc.cluster.local\n")
    said = []
    assert autopath_search_list(AutopathSettings(zones=(".",), path=str(path)), said.append) == (
        "corp.cluster.local.",
        "svc.cluster.local.",
    )
    walker = Walker(search=("corp.cluster.local.", "svc.cluster.local."), path=str(path))
    message, _ = walker.walk("web.shop.corp.cluster.local", client="203.0.113.1")
    assert lines(message)[1].endswith("A 10.110.0.1")
    assert (
        autopath_search_list(AutopathSettings(zones=(".",), path=str(tmp_path / "none")), said.append) == ()
        and "cannot be read" in said[0]
    )
