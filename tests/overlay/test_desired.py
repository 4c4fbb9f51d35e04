"""Wanted state, and the way to it from whatever there is."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.model.net import IPFamily
from narthex.overlay.changes import (
    AddDevice,
    AddDeviceAddress,
    DeleteDevice,
    ObservedDevice,
    OverlayState,
    PutEntry,
    RemoveDeviceAddress,
    RemoveEntry,
    SetDevice,
    incompatible,
    plan_changes,
    retained_device,
)
from narthex.overlay.desired import (
    DesiredState,
    ExternalInterface,
    KernelRoute,
    OverlayFdbEntry,
    OverlayNeighbor,
    OverlayRoute,
    desired_state,
    family_of_device,
    is_on_link,
    pod_mtu,
)
from narthex.overlay.net_conf import BackendConf, NetConf, subnet_env
from narthex.overlay.peers import OverlayPeer

FOUR, SIX = IPFamily.IPV4, IPFamily.IPV6
POD_NETWORKS = ("10.244.0.0/16", "fd44::/16")
OUTER = {
    FOUR: ExternalInterface(link="eth0", index=2, address="192.0.2.1", mtu=1500),
    SIX: ExternalInterface(link="eth0", index=2, address="fd02::1", mtu=1500),
}
SUBNETS = {FOUR: "10.244.1.0/24", SIX: "fd44:1::/64"}
MACS = {FOUR: "02:00:00:00:00:01", SIX: "02:00:00:00:00:11"}
WAYS = (KernelRoute("0.0.0.0/0", "192.0.2.254", 2), KernelRoute("192.0.2.0/24", "", 2), KernelRoute("fd02::/64", "", 2))


def conf(networks=POD_NETWORKS[:1], **backend):
    return NetConf(networks=networks, backend=BackendConf(**backend))


def peer(number, ip=""):
    ip = ip or f"192.0.2.{number}"
    return OverlayPeer(
        node=f"n{number}", family=FOUR, subnet=f"10.244.{number}.0/24", public_ip=ip, mac=f"02:00:00:00:00:{number:02x}"
    )


SIXTH = OverlayPeer(node="n6", family=SIX, subnet="fd44:6::/64", public_ip="fd09::6", mac="02:00:00:00:00:66")


def of(told, *peers, families=(FOUR,)):
    outer = {family: OUTER[family] for family in families}
    return desired_state(told, SUBNETS, peers, outer, MACS, WAYS)


def test_vxlan():
    want, problems = of(conf(), peer(3), peer(9, "198.51.100.9"))
    assert not problems
    (device,) = want.devices
    assert (device.name, device.vni, device.port, device.local, device.link) == ("flannel.1", 1, 8472, "192.0.2.1", 2)
    assert (device.mac, device.mtu, device.address) == ("02:00:00:00:00:01", 1450, "10.244.1.0")
    assert not device.learning
    assert want.neighbours == {
        OverlayNeighbor("flannel.1", "10.244.3.0", "02:00:00:00:00:03"),
        OverlayNeighbor("flannel.1", "10.244.9.0", "02:00:00:00:00:09"),
    }
    assert want.forwards == {
        OverlayFdbEntry("flannel.1", "02:00:00:00:00:03", "192.0.2.3"),
        OverlayFdbEntry("flannel.1", "02:00:00:00:00:09", "198.51.100.9"),
    }
    assert want.routes == {
        OverlayRoute("10.244.3.0/24", "10.244.3.0", "flannel.1", onlink=True),
        OverlayRoute("10.244.9.0/24", "10.244.9.0", "flannel.1", onlink=True),
    }
    assert {(one.path, one.value) for one in want.settings} == {("net/ipv4/ip_forward", 1)}


def test_direct_routing_is_for_those_on_the_same_link():
    want, _ = of(conf(direct_routing=True), peer(3), peer(9, "198.51.100.9"))
    assert want.routes == {
        OverlayRoute("10.244.3.0/24", "192.0.2.3", "eth0"),
        OverlayRoute("10.244.9.0/24", "10.244.9.0", "flannel.1", onlink=True),
    }
    assert len(want.neighbours) == len(want.forwards) == 1


def test_host_gw():
    want, problems = of(conf(type="host-gw"), peer(3), peer(9, "198.51.100.9"))
    assert want.routes == {OverlayRoute("10.244.3.0/24", "192.0.2.3", "eth0")}
    assert not (want.devices or want.neighbours or want.forwards)
    assert len(problems) == 1
    assert problems[0].startswith("node n9: 198.51.100.9 is not on-link on eth0")


def test_two_families_have_two_devices():
    want, _ = of(conf(POD_NETWORKS, vni=5), peer(3), SIXTH, families=(FOUR, SIX))
    assert [(one.name, one.address, one.mtu, one.local) for one in want.devices] == [
        ("flannel.5", "10.244.1.0", 1450, "192.0.2.1"),
        ("flannel-v6.5", "fd44:1::", 1430, "fd02::1"),
    ]
    assert OverlayRoute("fd44:6::/64", "fd44:6::", "flannel-v6.5", onlink=True) in want.routes
    assert {one.path for one in want.settings} == {
        "net/ipv4/ip_forward",
        "net/ipv6/conf/all/forwarding",
        "net/ipv6/conf/flannel-v6.5/accept_ra",
    }


@pytest.mark.parametrize(
    ("told", "families", "mtu"),
    [
        (conf(), (FOUR,), 1450),
        (conf(), (SIX,), 1430),
        (conf(POD_NETWORKS), (FOUR, SIX), 1430),
        (conf(mtu=9000), (FOUR,), 8950),
        (conf(type="host-gw"), (FOUR,), 1500),
    ],
)
def test_mtu(told, families, mtu):
    assert pod_mtu(told, {family: OUTER[family] for family in families}) == mtu


def test_a_link_that_is_too_narrow():
    with pytest.raises(ValueError, match="eth0 takes packets of 1300 bytes: too few for IPv6"):
        pod_mtu(conf(), {SIX: msgspec.structs.replace(OUTER[SIX], mtu=1300)})


def test_near():
    ways = (*WAYS, KernelRoute("192.0.2.128/25", "192.0.2.7", 2), KernelRoute("192.0.2.200/32", "", 3))
    near = [
        address
        for address in ("192.0.2.3", "192.0.2.129", "192.0.2.200", "8.8.8.8", "fd02::9")
        if is_on_link(address, ways, 2)
    ]
    assert near == ["192.0.2.3", "fd02::9"]


def test_subnet_env():
    assert subnet_env(conf(POD_NETWORKS), SUBNETS, 1430, masquerade=False) == (
        "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.1.1/24\n"
        "FLANNEL_IPV6_NETWORK=fd44::/16\nFLANNEL_IPV6_SUBNET=fd44:1::1/64\nFLANNEL_MTU=1430\nFLANNEL_IPMASQ=false\n"
    )
    assert subnet_env(conf(POD_NETWORKS[1:]), {SIX: "fd44:1::/64"}, 1430, masquerade=True).startswith(
        "FLANNEL_IPV6_NETWORK="
    )


WANT, _ = of(conf(POD_NETWORKS, direct_routing=True), peer(3), peer(9, "198.51.100.9"), SIXTH, families=(FOUR, SIX))
FOREIGN = frozenset(
    {
        OverlayRoute("0.0.0.0/0", "192.0.2.254", "eth0"),
        OverlayRoute("192.0.2.0/24", "", "eth0"),
        OverlayRoute("10.244.1.0/24", "", "cni0"),
        OverlayRoute("10.244.77.0/24", "192.0.2.77", "eth0"),
        OverlayRoute("fd44:1::/128", "", "flannel-v6.1"),
        OverlayRoute("172.16.0.0/24", "10.244.9.0", "flannel.1", onlink=True),
    }
)


def held(device, **more):
    fields = {
        name: getattr(device, name)
        for name in ("name", "vni", "port", "local", "link", "learning", "gbp", "mac", "mtu")
    }
    own = f"{device.address}/{device.family.host_bits}"
    return ObservedDevice(**{**fields, "index": 9, "kind": "vxlan", "up": True, "addresses": (own,), **more})


WHOLE = OverlayState(
    devices={device.name: held(device) for device in WANT.devices},
    neighbours=WANT.neighbours,
    forwards=WANT.forwards,
    routes=WANT.routes | FOREIGN,
)


def steps(have, want=WANT, made=frozenset()):
    return plan_changes(want, have, POD_NETWORKS, made)


def test_nothing_is_to_be_done_when_all_is_there():
    assert steps(WHOLE) == ()


def test_from_nothing_the_route_comes_last():
    made = steps(OverlayState())
    kinds = [type(step.entry) if isinstance(step, PutEntry) else type(step) for step in made]
    assert (
        kinds == [AddDevice, AddDeviceAddress] * 2 + [OverlayNeighbor] * 2 + [OverlayFdbEntry] * 2 + [OverlayRoute] * 3
    )


@pytest.mark.parametrize(
    "more",
    [
        {"vni": 2},
        {"port": 4789},
        {"local": "192.0.2.9"},
        {"link": 3},
        {"learning": True},
        {"gbp": True},
        {"kind": "bridge"},
    ],
)
def test_an_incompatible_device_goes_and_all_on_it_comes_anew(more):
    device = WANT.devices[0]
    have = msgspec.structs.replace(WHOLE, devices={**WHOLE.devices, device.name: held(device, **more)})
    made = steps(have)
    assert isinstance(made[0], DeleteDevice)
    assert made[1] == AddDevice(device)
    on_it = [one for one in (*WANT.neighbours, *WANT.forwards, *WANT.routes) if one.device == device.name]
    assert {step.entry for step in made if isinstance(step, PutEntry)} == set(on_it)
    assert incompatible(device, held(device)) == ""


@pytest.mark.parametrize("more", [{"mac": "02:00:00:00:00:99"}, {"mtu": 1400}, {"up": False}])
def test_what_can_be_changed_in_place_is(more):
    device = WANT.devices[0]
    have = msgspec.structs.replace(WHOLE, devices={**WHOLE.devices, device.name: held(device, **more)})
    assert steps(have) == (SetDevice(device),)


def test_addresses_of_an_earlier_subnet_go_and_others_stay():
    device = WANT.devices[0]
    other = held(device, addresses=("10.244.5.0/32", "203.0.113.5/32"))
    have = msgspec.structs.replace(WHOLE, devices={**WHOLE.devices, device.name: other})
    assert steps(have) == (
        RemoveDeviceAddress("flannel.1", "10.244.5.0/32"),
        AddDeviceAddress("flannel.1", "10.244.1.0/32"),
    )


def test_what_departed_nodes_left_goes():
    gone, mac = "10.244.8.0", "02:00:00:00:00:08"
    over = OverlayRoute("10.244.8.0/24", gone, "flannel.1", onlink=True)
    direct = OverlayRoute("10.244.6.0/24", "192.0.2.6", "eth0")
    have = msgspec.structs.replace(
        WHOLE,
        neighbours=WHOLE.neighbours | {OverlayNeighbor("flannel.1", gone, mac)},
        forwards=WHOLE.forwards | {OverlayFdbEntry("flannel.1", mac, "192.0.2.8")},
        routes=WHOLE.routes | {over, direct},
    )
    entries = {over, OverlayNeighbor("flannel.1", gone, mac), OverlayFdbEntry("flannel.1", mac, "192.0.2.8")}
    assert set(steps(have)) == {RemoveEntry(entry) for entry in entries}
    # A route over another link only when it was ours, and still is.
    assert RemoveEntry(direct) in steps(have, made=frozenset({direct}))
    assert RemoveEntry(direct) not in steps(have, made=frozenset({OverlayRoute("10.244.6.0/24", "192.0.2.66", "eth0")}))


OLD = ObservedDevice(
    name="flannel.1", index=9, kind="vxlan", up=True, mac="02:00:00:00:00:01", mtu=1450, vni=1, port=4789
)
HOST_GW = {"type": "host-gw"}


def switching(*peers, retained=True, **backend):
    kept = (retained_device(OLD, FOUR, SUBNETS[FOUR]),) if retained else ()
    outer = {FOUR: OUTER[FOUR]}
    want, problems = desired_state(conf(**backend), SUBNETS, peers, outer, MACS, WAYS, kept)
    return want, problems


def test_a_peer_that_still_has_vxlan_is_reached_through_the_device_of_before():
    changed = msgspec.structs.replace(peer(4), mac="")
    want, problems = switching(peer(3), changed, **HOST_GW)
    assert not problems
    assert want.devices == (retained_device(OLD, FOUR, SUBNETS[FOUR]),)
    assert want.routes == {
        OverlayRoute("10.244.3.0/24", "10.244.3.0", "flannel.1", onlink=True),
        OverlayRoute("10.244.4.0/24", "192.0.2.4", "eth0"),
    }
    assert {one.address for one in want.neighbours} == {"10.244.3.0"}
    have = OverlayState(devices={"flannel.1": OLD})
    assert not any(isinstance(step, AddDevice | SetDevice | DeleteDevice) for step in steps(have, want))


def test_a_node_without_a_device_sends_directly_to_whoever_has_one():
    want, problems = switching(peer(3), retained=False, **HOST_GW)
    assert want.routes == {OverlayRoute("10.244.3.0/24", "192.0.2.3", "eth0")}
    assert not want.devices and not problems


def test_a_node_with_vxlan_sends_directly_to_a_peer_without():
    near, far = (msgspec.structs.replace(peer(*one), mac="") for one in ((3,), (4, "198.51.100.4")))
    want, (problem,) = switching(near, far, retained=False)
    assert want.routes == {OverlayRoute("10.244.3.0/24", "192.0.2.3", "eth0")}
    assert problem.startswith("node n4: 198.51.100.4 is not on-link")


def test_a_device_of_a_previous_configuration_goes_last():
    want, _ = switching(msgspec.structs.replace(peer(3), mac=""), retained=False, **HOST_GW)
    before = OverlayRoute("10.244.3.0/24", "10.244.3.0", "flannel.1", onlink=True)
    have = OverlayState(devices={"flannel.1": OLD}, routes=frozenset({before}))
    put, delete = steps(have, want)
    assert put == PutEntry(OverlayRoute("10.244.3.0/24", "192.0.2.3", "eth0"))
    assert isinstance(delete, DeleteDevice) and delete.name == "flannel.1"
    bridge = msgspec.structs.replace(OLD, kind="bridge")
    assert steps(OverlayState(devices={"flannel.1": bridge}, routes=want.routes), want) == ()


@pytest.mark.parametrize(
    ("name", "family"),
    [("flannel.1", FOUR), ("flannel-v6.77", SIX), ("flannel", None), ("flannel.x", None), ("vxlan.1", None)],
)
def test_devices_of_any_vni_are_known_by_name(name, family):
    assert family_of_device(name) is family


def test_a_route_that_leads_elsewhere_is_replaced():
    right = OverlayRoute("10.244.9.0/24", "10.244.9.0", "flannel.1", onlink=True)
    wrong = OverlayRoute("10.244.9.0/24", "192.0.2.9", "eth0")
    have = msgspec.structs.replace(WHOLE, routes=WHOLE.routes - {right} | {wrong})
    assert steps(have, made=frozenset({wrong})) == (PutEntry(right),)


@pytest.mark.parametrize(
    ("subnet", "peer", "device"),
    [
        ("fd00:10:244:3::/64", "fd00:192:168:49::d", "eth0"),
        ("fd00:10:244:3::/64", "fd00:10:244:3::1", "flannel-v6.1"),
        ("fd00:10:244:3::/64", "fd00:10:244:3::", "flannel-v6.2"),
        ("10.244.3.0/24", "192.168.49.13", "eth0"),
    ],
)
def test_a_gateway_that_the_old_route_leads_to_has_a_route_of_its_own_meanwhile(subnet, peer, device):
    gateway = subnet.partition("/")[0]
    name = "flannel-v6.1" if ":" in subnet else "flannel.1"
    old, new = OverlayRoute(subnet, peer, device), OverlayRoute(subnet, gateway, name, onlink=True)
    have = OverlayState(routes=frozenset({old}))
    want = DesiredState(devices=WANT.devices, routes=frozenset({new}))
    made = plan_changes(want, have, (), frozenset())
    assert done(have, made).routes == {new}
    hidden = device != name and ":" in subnet
    assert (PutEntry(OverlayRoute(f"{gateway}/128", "", name)) in made) == hidden


def done(have, made):
    """What the kernel has after some steps."""
    devices, neighbours, forwards, routes = (
        dict(have.devices),
        set(have.neighbours),
        set(have.forwards),
        set(have.routes),
    )
    for step in made:
        match step:
            case DeleteDevice(name=name):
                del devices[name]
                for entries in (neighbours, forwards, routes):
                    entries -= {one for one in entries if one.device == name}
            case AddDevice(device) | SetDevice(device):
                before = devices.get(device.name)
                devices[device.name] = held(device, addresses=before.addresses if before else ())
            case AddDeviceAddress(device=name, address=address):
                old = devices[name]
                devices[name] = msgspec.structs.replace(old, addresses=(*old.addresses, address))
            case RemoveDeviceAddress(device=name, address=address):
                old = devices[name]
                devices[name] = msgspec.structs.replace(
                    old, addresses=tuple(one for one in old.addresses if one != address)
                )
            case PutEntry(entry=OverlayRoute() as route):
                routes = {one for one in routes if one.destination != route.destination} | {route}
            case PutEntry(entry=OverlayNeighbor() as entry):
                neighbours = {
                    one for one in neighbours if (one.device, one.address) != (entry.device, entry.address)
                } | {entry}
            case PutEntry(entry=entry):
                forwards = {one for one in forwards if (one.device, one.mac) != (entry.device, entry.mac)} | {entry}
            case RemoveEntry(entry=entry):
                for entries in (neighbours, forwards, routes):
                    entries.discard(entry)
    return OverlayState(
        devices=devices, neighbours=frozenset(neighbours), forwards=frozenset(forwards), routes=frozenset(routes)
    )


NUMBERS = st.integers(2, 9)
NAMES = st.sampled_from(("flannel.1", "flannel-v6.1"))
MAC = NUMBERS.map(lambda number: f"02:00:00:00:00:{number:02x}")
NEIGHBOURS = st.builds(OverlayNeighbor, NAMES, NUMBERS.map(lambda number: f"10.244.{number}.0"), MAC)
FORWARDS = st.builds(OverlayFdbEntry, NAMES, MAC, NUMBERS.map(lambda number: f"192.0.2.{number}"))
ROUTES = st.builds(
    lambda number, onlink: OverlayRoute(f"10.244.{number}.0/24", f"10.244.{number}.0", "flannel.1", onlink),
    NUMBERS,
    st.booleans(),
)
DEVICES = st.fixed_dictionaries(
    {},
    optional={
        device.name: st.builds(
            lambda device=device, **more: held(device, **more),
            vni=st.sampled_from((1, 2)),
            mtu=st.sampled_from((1450, 1430)),
            up=st.booleans(),
            addresses=st.lists(st.sampled_from(("10.244.1.0/32", "10.244.4.0/32", "203.0.113.5/32")), unique=True).map(
                tuple
            ),
        )
        for device in WANT.devices
    },
)


@given(DEVICES, st.frozensets(NEIGHBOURS), st.frozensets(FORWARDS), st.frozensets(ROUTES), st.frozensets(ROUTES))
def test_from_anywhere_one_look_is_enough(devices, neighbours, forwards, routes, made):
    """The law: after the steps nothing is left to do, all that is wanted is there, and nothing foreign is touched."""
    have = OverlayState(
        devices=devices,
        # A kernel has one neighbour for an address.
        neighbours=frozenset({(one.device, one.address): one for one in neighbours if one.device in devices}.values()),
        forwards=frozenset(one for one in forwards if one.device in devices),
        routes=frozenset(one for one in routes if one.device in devices) | FOREIGN - WANT.routes,
    )
    after = done(have, plan_changes(WANT, have, POD_NETWORKS, made))
    assert plan_changes(WANT, after, POD_NETWORKS, made) == ()
    assert after.neighbours == WANT.neighbours and after.forwards == WANT.forwards
    assert WANT.routes <= after.routes
    assert {one for one in FOREIGN if not one.device.startswith("flannel")} <= after.routes
