"""VLANs of the plugin `bridge`, on a kernel whose bridges filter them, beside the reference plugin."""

import json

from tests.cni.kernel.cni_place import Place
from tests.cni.kernel.side_by_side import Case, differences
from tests.cni.kernel.test_cni_side_by_side import IPAM4, add, bridge, check, existing

from narthex.cni.plugins.bridge import gateway_port
from narthex.linux.run import run

KEPT = {"vlan": 100, "preserveDefaultVlan": True}
"""Debian's reference plugin, 1.1.1, always keeps the default VLAN; since 1.8, the default is to remove it."""

PINNED = "link set cni0 address 02:00:00:00:00:01"


def test_side_by_side(tmp_path):
    """Two pods in a VLAN with a gateway, on a filtering bridge with a default VLAN of its own."""
    case = Case(
        (add(bridge(**KEPT)), add(bridge(**KEPT), "b"), check(bridge(**KEPT))),
        existing(PINNED, options="vlan_filtering 1 vlan_default_pvid 7"),
        pods=("a", "b"),
    )
    assert differences(case, tmp_path) == []


def test_pods_reach_their_vlan_only(tmp_path):
    trunk = {"vlan": 100, "vlanTrunk": [{"id": 200}, {"minID": 300, "maxID": 302}]}
    vlans = {"a": trunk, "b": {"vlan": 100}, "c": {"vlan": 200}, "d": {"vlanTrunk": [{"id": 5}]}}
    with Place(tmp_path) as place:
        configs = {
            name: place.bridge(
                ipMasq=False, isGateway=name == "a", ipam={**IPAM4, "dataDir": str(place.networks)}, **vlan
            )
            for name, vlan in vlans.items()
        }
        results = {name: place.add(name, config=config) for name, config in configs.items()}
        gateway = results["a"]["interfaces"][3]
        assert gateway["name"] == "cni0.100" and "sandbox" not in gateway
        shown = json.loads(run(["bridge", "-j", "vlan"], namespace=place.name))
        ports = {
            one["ifname"]: {each["vlan"]: "PVID" in each.get("flags", ()) for each in one["vlans"]} for one in shown
        }
        found = {name: ports[result["interfaces"][1]["name"]] for name, result in results.items()}
        trunks = dict.fromkeys((200, 300, 301, 302), False)
        assert found == {"a": {100: True} | trunks, "b": {100: True}, "c": {200: True}, "d": {5: False, 1: True}}
        for name in "abcd":
            place.serve(name, 80)
        place.good("CHECK", configs["a"] | {"prevResult": results["a"]}, "a")
        assert place.ask("b", "10.77.0.2", 80) == "a 10.77.0.3"
        assert place.ask("", "10.77.0.2", 80) == "a 10.77.0.1"
        assert place.ask("b", "10.77.0.4", 80, patience=0.5) is None
        for name, config in configs.items():
            place.good("DEL", config, name)
        assert sorted(set(place.links())) == ["cni0", "cni0.100", gateway_port("cni0.100")]
        assert place.reserved() == []
