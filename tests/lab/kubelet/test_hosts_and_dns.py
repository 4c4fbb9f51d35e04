"""Files that a kubelet puts in the place of the machine's."""

import pytest

from narthex.lab.kubelet.environment import hostname, hosts, resolver

POD = {"metadata": {"name": "web-1", "namespace": "shop"}, "spec": {}}


def pod(**spec):
    return {**POD, "spec": spec}


def test_hosts_has_the_pod_by_all_its_addresses():
    lines = hosts(POD, ("10.244.1.2", "fd00::2")).splitlines()
    assert lines[1] == "127.0.0.1\tlocalhost"
    assert lines[-2:] == ["10.244.1.2\tweb-1", "fd00::2\tweb-1"]


def test_hosts_has_its_name_in_a_subdomain_and_aliases():
    given = pod(
        hostname="busy", subdomain="peers", hostAliases=[{"ip": "192.0.2.9", "hostnames": ["a.example", "b.example"]}]
    )
    text = hosts(given, ("10.244.1.2",))
    assert "10.244.1.2\tbusy.peers.shop.svc.cluster.local\tbusy\n" in text
    assert text.endswith("# Entries added by HostAliases.\n192.0.2.9\ta.example\tb.example\n")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, "search shop.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n"),
        ({"dnsPolicy": "Default"}, None),
        ({"hostNetwork": True}, None),
        (
            {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"},
            "search shop.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n",
        ),
        (
            {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["192.0.2.53"], "searches": ["x.example"]}},
            "search x.example\nnameserver 192.0.2.53\n",
        ),
        (
            {
                "dnsConfig": {
                    "options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}],
                    "nameservers": ["10.96.0.10"],
                }
            },
            "search shop.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\n"
            "options ndots:2 edns0\n",
        ),
    ],
)
def test_resolv_conf(spec, expected):
    assert resolver(pod(**spec)) == expected


def test_a_pod_has_the_host_name_that_overrides_others():
    spec = {"hostname": "web-0", "subdomain": "web", "hostnameOverride": "db.example.com"}
    pod = {"metadata": {"name": "a", "namespace": "shop"}, "spec": spec}
    assert hostname(pod) == "db.example.com"
    assert hosts(pod, ["10.244.1.2"]).endswith("10.244.1.2\tdb.example.com\n")
    del spec["hostnameOverride"]
    assert hostname(pod) == "web-0"
    assert hosts(pod, ["10.244.1.2"]).endswith("10.244.1.2\tweb-0.web.shop.svc.cluster.local\tweb-0\n")
