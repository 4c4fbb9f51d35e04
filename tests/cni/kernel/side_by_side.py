"""The same requests to the reference plugins and to ours: exit status, result, and the state of kernel and files afterwards.

Names, hardware addresses, and paths that each side chooses for itself are replaced by what they stand for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.cni.kernel.cni_place import Place

from narthex.linux.links import ip_batch
from narthex.linux.run import run

REFERENCE = Path("/usr/lib/cni")
_OWN_NAME = re.compile("veth[0-9a-f]{8}")
_OWN_MAC = re.compile("[0-9a-f][26ae](:[0-9a-f]{2}){5}")
_PORT_FIELDS = ("hairpin", "isolated")
_LINK_SETTINGS = (
    *("ipv4/conf/%s/arp_notify", "ipv6/conf/%s/disable_ipv6"),
    *("ipv6/conf/%s/accept_ra", "ipv6/conf/%s/accept_dad"),
)
_SETTINGS = ("net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding")


class Ask(NamedTuple):
    """One request. `chain`: with the result of the last ADD as `prevResult`."""

    command: str
    config: dict[str, Any]
    pod: str = "a"
    plugin: str = ""
    environment: dict[str, str] | None = None
    chain: bool = False


class Case(NamedTuple):
    """Requests in order, after `ip` commands on the node and files in the directory of the reservations."""

    asks: tuple[Ask, ...]
    links: tuple[str, ...] = ()
    leases: dict[str, str] = {}
    pods: tuple[str, ...] = ("a",)
    differ: tuple[str, ...] = ()
    """Paths of what differs on purpose: all of them, and nothing else."""


def differences(case: Case, scratch: Path) -> list[str]:
    """Run a case with both; return the paths of what differs, sorted.

    Of errors, only the exit status counts. If an ADD failed, the reference plugins leave links behind, and ours do not, so
    that the state does not count.
    """
    theirs, ours = (outcome(case, scratch / name, name == "reference") for name in ("reference", "ours"))
    found = sorted(_paths(theirs, ours, ""))
    return [path for path in found if path.endswith("/status")] or found


def _paths(theirs: Any, ours: Any, path: str) -> Iterator[str]:
    if theirs == ours:
        return
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in theirs.keys() | ours.keys():
            yield from _paths(theirs.get(name), ours.get(name), f"{path}/{name}")
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for number, pair in enumerate(zip(theirs, ours, strict=True)):
            yield from _paths(*pair, f"{path}/{number}")
    else:
        yield path


def outcome(case: Case, scratch: Path, reference: bool) -> dict[str, Any]:
    """Return what each request answered, and the state after all of them."""
    scratch.mkdir()
    with Place(scratch) as place:
        if case.links:
            ip_batch(place.name, list(case.links))
        for name, text in case.leases.items():
            (place.networks / "net").mkdir(parents=True, exist_ok=True)
            (place.networks / "net" / name).write_bytes(text.encode())
        for pod in case.pods:
            place.pod(pod)
        found: dict[str, Any] = {}
        before, failed = None, False
        for number, ask in enumerate(case.asks):
            status, said = _answer(place, ask, before, reference)
            found[f"{number} {ask.command}"] = {"status": status, "result": said if status == 0 else None}
            if ask.command == "ADD":
                before, failed = (said, failed) if status == 0 else (before, True)
        if not failed:
            found |= {pod or "node": _state(f"{place.name}{pod}") for pod in ("", *case.pods)}
            found |= {"leases": _leases(place), "rules": _rules(place)}
        words = _words(place, case)
        replaced: dict[str, Any] = json.loads(_replaced(json.dumps(found), words))
        return replaced


def _answer(place: Place, ask: Ask, before: Any, reference: bool) -> tuple[int, Any]:
    config = json.loads(json.dumps(ask.config).replace("DATA", str(place.networks)))
    if ask.chain:
        config["prevResult"] = before
    programs = REFERENCE if reference else place.programs
    path = None if reference else f"{place.programs}:{REFERENCE}"
    environment = {**({"CNI_PATH": path} if path else {}), **(ask.environment or {})}
    plugin = ask.plugin or config["type"]
    if not (programs / plugin).exists():
        programs = REFERENCE
    return place.call(ask.command, config, ask.pod, plugin=plugin, programs=programs, environment=environment)


def _words(place: Place, case: Case) -> dict[str, str]:
    """What stands for the names and addresses of this run."""
    words = {str(place.networks): "DATA"}
    for where in ("", *case.pods):
        for link in json.loads(run(["ip", "-j", "-d", "link"], namespace=f"{place.name}{where}")):
            name = link["ifname"]
            if not where and _OWN_NAME.fullmatch(name):
                name = words[name] = f"VETH{sum(one.startswith('VETH') for one in words.values())}"
            if link["address"] != "00:00:00:00:00:00":
                words[link["address"]] = f"MAC of {where or 'node'} {name}"
    words[place.name] = "NODE"
    return words


def _replaced(text: str, words: dict[str, str]) -> str:
    for word, meaning in words.items():
        text = text.replace(word, meaning)
    # What is gone at the end.
    return _OWN_MAC.sub("MAC", _OWN_NAME.sub("VETH", text))


def _state(namespace: str) -> dict[str, Any]:
    links = json.loads(run(["ip", "-j", "-d", "addr"], namespace=namespace))
    return {
        "links": {one["ifname"]: _link(one) for one in links if one["ifname"] not in ("lo", "uplink")},
        "routes": _routes(namespace),
        "vlans": _vlans(namespace),
        "settings": _settings(namespace, [one["ifname"] for one in links if one["ifname"] not in ("lo", "uplink")]),
    }


def _settings(namespace: str, links: list[str]) -> dict[str, str]:
    paths = [*_SETTINGS, *(f"net/{name}" % link for name in _LINK_SETTINGS for link in links)]
    values = run(["cat", *(f"/proc/sys/{path}" for path in paths)], namespace=namespace).split()
    return dict(zip(paths, values, strict=True))


def _link(one: dict[str, Any]) -> dict[str, Any]:
    info = one.get("linkinfo", {})
    port = info.get("info_slave_data", {})
    return {
        "kind": info.get("info_kind"),
        "up": "UP" in one["flags"],
        "promisc": one.get("promiscuity", 0) > 0 and "PROMISC" in one["flags"],
        "mtu": one["mtu"],
        "mac": one["address"],
        "master": one.get("master"),
        "filtering": info.get("info_data", {}).get("vlan_filtering"),
        "port": {name: port[name] for name in _PORT_FIELDS if name in port}
        | ({"state": port["state"]} if port else {}),
        "addresses": sorted(
            f"{each['local']}/{each['prefixlen']} {each['scope']} {each.get('broadcast', '')}"
            for each in one.get("addr_info", ())
            if each["scope"] != "link"
        ),
    }


def _routes(namespace: str) -> list[str]:
    found = []
    for family in ("-4", "-6"):
        for one in json.loads(run(["ip", family, "-j", "route", "show", "table", "all"], namespace=namespace)):
            if one.get("dev") in ("lo", "uplink") or one["dst"].startswith(("ff00", "fe80", "multicast")):
                continue
            if one.get("type") in ("local", "broadcast", "anycast", "multicast"):
                continue
            names = ("dst", "gateway", "dev", "prefsrc", "scope", "metric", "table", "type")
            found.append(" ".join(f"{name} {one[name]}" for name in names if name in one))
    return sorted(found)


def _vlans(namespace: str) -> dict[str, Any]:
    found = json.loads(run(["bridge", "-j", "vlan"], namespace=namespace) or "[]")
    return {one["ifname"]: one["vlans"] for one in found}


def _leases(place: Place) -> dict[str, str]:
    found = {}
    for path in sorted(place.networks.glob("*/*")):
        if path.name != "lock" and path.is_file():
            found[f"{path.parent.name}/{path.name}"] = path.read_text()
    return found


def _rules(place: Place) -> list[str]:
    text = run(["iptables-save"], namespace=place.name) + run(["ip6tables-save"], namespace=place.name)
    return sorted(line for line in text.splitlines() if line.startswith("-A"))
