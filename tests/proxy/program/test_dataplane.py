"""A mode's backend and Targets as the settings say; what a mode with a relay adds to a proxy."""

from types import SimpleNamespace

import pytest

from narthex.model.net import FAMILIES, IPFamily
from narthex.proxy.backends import BACKENDS
from narthex.proxy.backends.userspace.backend import UserspaceBackend
from narthex.proxy.kernel.dataplanes import dataplane
from narthex.proxy.kernel.userspace import UserspaceTarget
from narthex.proxy.plan.ir import Deviation
from narthex.proxy.program.dataplane import RunningDataplane, dataplane_of
from narthex.proxy.program.reload import in_place
from narthex.proxy.program.report import written
from narthex.proxy.program.settings import SettingsError, settings
from narthex.runtime.configuration.file import relay_ports
from narthex.testing.build import endpoint, endpoint_slice, plan, service


def told(**fields):
    return settings({"clusterCIDR": "10.64.0.0/12", **fields}, None, "node-a")


@pytest.mark.parametrize(
    ("text", "ports"),
    [("", None), ("0-0", None), ("61000-61009", (61000, 61009)), ("61000+9", (61000, 61009)), ("7000", (7000, 7000))],
)
def test_a_range_of_ports_is_read_as_kube_proxy_wrote_it(text, ports):
    assert relay_ports(text) == ports
    assert told(mode="userspace", portRange=text).relay_ports == ports


@pytest.mark.parametrize("text", ["a-b", "7000-", "70000-70001", "7001-7000", "0-5"])
def test_what_is_no_range_is_an_error_where_it_counts(text):
    with pytest.raises(SettingsError, match="portRange"):
        told(mode="userspace", portRange=text)
    assert told(mode="iptables", portRange=text).relay_ports is None


def test_the_relay_listens_in_the_range():
    made = plan(service("shop/web", "10.110.0.5"), endpoint_slice("shop/web", endpoint("10.64.1.10")))
    rules = dataplane_of(told(mode="userspace", portRange="7000-7000")).backend.render(made)
    assert [one.port for one in rules.listeners.values()] == [7000]
    assert dataplane_of(told(mode="userspace")).backend is BACKENDS["userspace"]
    assert dataplane_of(told(mode="iptables")).backend is BACKENDS["iptables"]


def test_each_family_has_a_target_that_ends_with_the_proxy(monkeypatch):
    ended = []
    monkeypatch.setattr(UserspaceTarget, "close", lambda self: ended.append(self._family))
    plane = RunningDataplane(told(mode="userspace"), FAMILIES)
    assert set(plane.targets) == set(FAMILIES)
    assert Deviation.RELAYED in plane.backend.deviations
    plane.close()
    assert ended == list(FAMILIES)
    RunningDataplane(told(mode="iptables"), FAMILIES).close()
    assert ended == list(FAMILIES)


def test_least_connections_are_possible_with_socket_load_balancing():
    plain, balanced = (
        RunningDataplane(told(mode="nftables", narthex={"socketLoadBalancing": on}), FAMILIES) for on in (False, True)
    )
    assert Deviation.NO_LEAST_CONNECTIONS in plain.unable
    assert plain.unable - balanced.unable == {Deviation.NO_LEAST_CONNECTIONS}
    balanced.sockets = SimpleNamespace(possible=False, close=lambda: None)
    assert balanced.unable == plain.unable
    plain.close()
    balanced.close()


@pytest.mark.parametrize("field", ["socketLoadBalancing", "endpointEjection"])
def test_socket_load_balancing_takes_a_new_process(field):
    own = {"socketLoadBalancing": True, "endpointEjection": True}
    assert not in_place(told(narthex=own), told(narthex={"socketLoadBalancing": field != "socketLoadBalancing"}))


def test_another_range_takes_a_new_process():
    one = told(mode="userspace", portRange="7000-7009")
    assert in_place(one, told(mode="userspace", portRange="7000-7009"))
    assert not in_place(one, told(mode="userspace", portRange="7000-7010"))


def test_what_was_written_is_told():
    backend = UserspaceBackend()
    web = service("shop/web", "10.110.0.5")
    before = backend.render(plan(web, endpoint_slice("shop/web", endpoint("10.64.1.10"))))
    more = endpoint_slice("shop/web", endpoint("10.64.1.10"), endpoint("10.64.1.11"))
    changes = backend.advance(before, plan(web, more))[1]
    assert written(changes) == "1 listener"
    assert dataplane("userspace").transactions(changes) == 0, "no rule differs, so nothing needs an announcement"
    gone = backend.advance(before, plan())[1]
    assert written(gone).startswith("1 listener closed; wrote ")
    assert dataplane("userspace").transactions(gone) > 0


@pytest.mark.parametrize(
    "mode, ipv4, ipv6",
    [
        ("nftables", "nft", "nft"),
        ("iptables", "iptables-save iptables-restore", "ip6tables-save ip6tables-restore"),
        ("ipvs", "iptables-save iptables-restore ipset", "ip6tables-save ip6tables-restore ipset"),
        ("userspace", "iptables-save iptables-restore", "ip6tables-save ip6tables-restore"),
    ],
)
def test_the_programs_that_a_mode_runs(mode, ipv4, ipv6):
    assert dataplane(mode).tools(IPFamily.IPV4) == tuple(ipv4.split())
    assert dataplane(mode).tools(IPFamily.IPV6) == tuple(ipv6.split())
