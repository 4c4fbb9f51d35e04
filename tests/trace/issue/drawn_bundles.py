"""Bundles of a node as its tools would print it, for objects of the address plan of `narthex.testing.build`."""

import json

from narthex.lab.encode import encode
from narthex.model import IPFamily, Snapshot
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.planner import NodeConfig, plan_once
from narthex.testing.build import NODE, NODE_IPS
from narthex.trace.node.layout import TAKEN, BundleManifest, PartStatus
from narthex.trace.program.bundle import Bundle

POD_NETS = {NODE: ("10.64.1.0/24", "fd64:0:0:1::/64"), "worker-b": ("10.64.2.0/24", "fd64:0:0:2::/64")}
PEERS = {"worker-b": ("10.20.0.12", "fd20::12")}


def bundle(snapshot: Snapshot, config: NodeConfig, mode: str, objects: dict[str, str] | None = None) -> Bundle:
    """Return the bundle of node worker-a in a mode."""
    parts = {**facts(), **(objects or {})}
    for family in IPFamily:
        text = BACKENDS[mode].text(BACKENDS[mode].render(plan_once(snapshot, config, family)))
        for path, lines in _by_tool(text, mode, family).items():
            parts[path] = parts.get(path, "") + lines
    table = BundleManifest(
        node=NODE, writer="drawn", parts=tuple(PartStatus(path=path, status=TAKEN) for path in parts)
    )
    return Bundle(origin="drawn", table=table, parts=parts)


def _by_tool(text: str, mode: str, family: IPFamily) -> dict[str, str]:
    """Return the text of a backend as the output of the tools of which it is the input."""
    if mode == "nftables":
        return {"rules/nft.txt": text}
    tool = "iptables" if family is IPFamily.IPV4 else "ip6tables"
    found: dict[str, list[str]] = {}
    for line in text.split("\n"):
        path = f"rules/{tool}-nft.txt"
        if line.startswith(("create ", "add ")):
            path = "rules/ipset.txt"
        elif line.startswith(("-A -", "-a -")):
            path = "rules/ipvs.txt"
        found.setdefault(path, []).append(line)
    return {path: "\n".join(lines) + "\n" for path, lines in found.items()}


def facts() -> dict[str, str]:
    """Return links, addresses, routes, and settings of node worker-a."""
    links = [
        {"ifindex": 1, "ifname": "lo", "flags": ["LOOPBACK", "UP"], "mtu": 65536},
        {"ifindex": 2, "ifname": "eth0", "flags": ["BROADCAST", "UP"], "mtu": 1500},
        {"ifindex": 3, "ifname": "cni0", "flags": ["BROADCAST", "UP"], "mtu": 1500, "linkinfo": {"info_kind": "bridge"}},
        *(
            {"ifindex": 10 + n, "ifname": f"veth{n:08x}", "flags": ["UP"], "mtu": 1500, "master": "cni0",
             "linkinfo": {"info_kind": "veth", "info_slave_kind": "bridge"}}
            for n in range(30)
        ),
    ]  # fmt: skip
    own = {
        "lo": [("127.0.0.1", 8), ("::1", 128)],
        "eth0": [(ip, 64 if ":" in ip else 24) for ip in NODE_IPS],
        "cni0": [("10.64.1.1", 24), ("fd64:0:0:1::1", 64)],
    }
    addresses = [
        {"ifname": name, "addr_info": [{"local": ip, "prefixlen": length, "scope": "global"} for ip, length in held]}
        for name, held in own.items()
    ]
    parts = {"net/links.json": json.dumps(links), "net/addresses.json": json.dumps(addresses)}
    for version, family in ((4, 0), (6, 1)):
        local = [
            {"type": "local", "dst": ip, "dev": name, "table": "local"} for name, held in own.items() for ip, _ in held
        ]
        routes = [
            {"dst": "default", "gateway": ("10.20.0.1", "fd20::1")[family], "dev": "eth0"},
            {"dst": ("10.20.0.0/16", "fd20::/64")[family], "dev": "eth0", "prefsrc": NODE_IPS[family * 2]},
            {"dst": POD_NETS[NODE][family], "dev": "cni0"},
            {"dst": POD_NETS["worker-b"][family], "gateway": PEERS["worker-b"][family], "dev": "eth0"},
            *(each for each in local if (":" in str(each["dst"])) is bool(family)),
        ]
        parts[f"net/routes-{version}.json"] = json.dumps(routes)
        parts[f"net/policies-{version}.json"] = json.dumps(
            [
                {"priority": n, "src": "all", "table": name}
                for n, name in ((0, "local"), (32766, "main"), (32767, "default"))
            ]
        )
    parts["net/sysctls.txt"] = "".join(
        f"{name} = 1\n"
        for name in ("net.ipv4.ip_forward", "net.bridge.bridge-nf-call-iptables", "net.bridge.bridge-nf-call-ip6tables",
                     "net.ipv6.conf.all.forwarding", *(f"net.ipv4.conf.veth{n:08x}.rp_filter" for n in range(30)))
    )  # fmt: skip
    return parts


def objects(snapshot: Snapshot) -> dict[str, str]:
    """Return the lists of objects of a bundle."""
    slices = []
    for each in (each for held in snapshot.slices.values() for each in held.values()):
        item = encode(each)
        item["metadata"]["labels"] = {"kubernetes.io/service-name": each.service_name}
        slices.append(item)
    lists = {
        "services": [*map(encode, snapshot.services.values())],
        "nodes": [*map(encode, snapshot.nodes.values())],
        "endpointslices": slices,
    }
    return {
        f"objects/{name}.json": json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        for name, items in lists.items()
    }
