"""Which CNI plugins run for a pod."""

from narthex.cni.program.runtime import NetworkConfigList, RuntimeConf
from narthex.lab.program.network import sysctls_of, without_idle_plugins

BRIDGE, TUNING = {"type": "bridge"}, {"type": "tuning"}
PORTS = {"type": "portmap", "capabilities": {"portMappings": True}}


def plugins(*chain, **capabilities):
    network = NetworkConfigList(name="n", version="1.0.0", plugins=chain)
    return without_idle_plugins(network, RuntimeConf(id="c", namespace="/n", capabilities=capabilities)).plugins


def test_only_a_pod_with_host_ports_needs_portmap():
    assert plugins(BRIDGE, PORTS, TUNING, portMappings=[]) == (BRIDGE, TUNING)
    assert plugins(BRIDGE, PORTS, TUNING, portMappings=[{"hostPort": 80}]) == (BRIDGE, PORTS, TUNING)


def test_the_first_plugin_makes_the_network():
    made = {**BRIDGE, "capabilities": {"ips": True}}
    assert plugins(made, PORTS) == (made,)


def test_a_pod_gets_the_kernel_settings_of_its_namespace_that_a_kubelet_allows():
    wanted = [
        {"name": "net.ipv4.ip_unprivileged_port_start", "value": "53"},
        {"name": "net.ipv4.ip_forward", "value": "0"},
        {"name": "kernel.panic", "value": "1"},
    ]
    pod = {"spec": {"securityContext": {"sysctls": wanted}}}
    assert sysctls_of(pod) == {"net/ipv4/ip_unprivileged_port_start": "53"}
    assert sysctls_of({"spec": {"securityContext": None}}) == {}
