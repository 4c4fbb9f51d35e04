"""The scenario corpus is well-formed, and together it shows every behaviour that packets can show."""

import collections
import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from narthex.testing import scenario

FOLDER = Path(__file__).parents[1] / "scenarios"
PATHS = sorted(FOLDER.glob("*.yaml"))
EXAMPLES = {
    "affinity-same-client-same-backend", "both-policies-local", "clusterip-one-backend", "ipvs-virtual-servers",
    "nodeport-hairpin", "noendpoints-every-frontend",
}  # fmt: skip
"""Files that came from elsewhere; their `source` cites no rows."""

MODES = {"iptables", "nftables", "ipvs", "userspace"}
LEVELS = {"must", "quirk"}
BASES = {"upstream-test", "upstream-code", "e2e", "kernel-check"}
NEEDED = {"name", "summary", "source", "basis", "level", "modes", "node", "objects", "flows"}
NODE = {"name", "ips", "podCIDRs", "labels", "config"}
CONFIG = {
    "detectLocalMode", "clusterCIDR", "bridgeInterface", "interfaceNamePrefix", "masqueradeAll", "nodePortAddresses",
    "localhostNodePorts", "featureGates",
}  # fmt: skip
DETECT = {"ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix", ""}
KINDS = {
    ("v1", "Service"), ("discovery.k8s.io/v1", "EndpointSlice"), ("networking.k8s.io/v1", "ServiceCIDR"),
}  # fmt: skip
CONNECTION = {"from", "to", "port", "proto"}
FEWEST_FILES = 75
ROWS = re.compile(r"rows ((?:\d+\.\d+)(?:, \d+\.\d+)*);", re.ASCII)
INDEX_ROW = re.compile(r"^\| (\d+\.\d+) \| [^|]+ \| ([^|]+) \|$", re.ASCII | re.MULTILINE)
GROUPS = {1: 18, 2: 15, 3: 11, 4: 12, 5: 11, 6: 9, 7: 10, 8: 5, 9: 18, 10: 14, 11: 5, 12: 5, 13: 8, 14: 8}
GROUPS |= {24: 14, 25: 14}
"""How many rows each group of the index has."""

Socket = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


def read(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)


def address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address; leading zeros of octets are decimal (row 1.13)."""
    return ipaddress.ip_address(text if ":" in text else ".".join(str(int(octet)) for octet in text.split(".")))


def socket_of(target: str) -> Socket:
    host, _, port = target.rpartition(":")
    return address(host.strip("[]")), int(port)


def backends(doc: dict[str, Any]) -> set[Socket]:
    """Every address and port that the slices name, first addresses only (row 2.6)."""
    slices = [obj for obj in doc["objects"] if obj["kind"] == "EndpointSlice" and obj["addressType"] != "FQDN"]
    return {
        (address(endpoint["addresses"][0]), port.get("port"))
        for each in slices
        for endpoint in each["endpoints"]
        if endpoint["addresses"]
        for port in each["ports"]
    }


def rows_of(doc: dict[str, Any]) -> list[str]:
    match = ROWS.match(doc["source"])
    return match[1].split(", ") if match else []


def index() -> dict[str, str]:
    """The README's index: row to "packets" or the reason why packets cannot show it."""
    return dict(INDEX_ROW.findall((FOLDER / "README.md").read_text(encoding="utf-8")))


def faults(doc: dict[str, Any], stem: str) -> Iterator[str]:
    """One line for each thing that the format does not allow."""
    yield from (f"lacks {key}" for key in sorted(NEEDED - doc.keys()))
    yield from (f"unknown key {key}" for key in sorted(doc.keys() - NEEDED - {"since", "steps"}))
    if doc["name"] != stem:
        yield f"name {doc['name']!r} is not the file's"
    for key, allowed in (("basis", BASES), ("level", LEVELS)):
        if doc[key] not in allowed:
            yield f"{key} {doc[key]!r}"
    if not doc["modes"] or set(doc["modes"]) - MODES:
        yield f"modes {doc['modes']}"
    yield from node_faults(doc["node"])
    yield from object_faults(doc["objects"])
    yield from flow_faults(doc)
    yield from step_faults(doc.get("steps", []))


def node_faults(node: dict[str, Any]) -> Iterator[str]:
    yield from (f"node {key}" for key in sorted(node.keys() ^ NODE))
    yield from (f"config {key}" for key in sorted(node["config"].keys() - CONFIG))
    if node["config"].get("detectLocalMode") not in DETECT:
        yield "detectLocalMode"
    for text in node["ips"]:
        address(text)
    for text in node["podCIDRs"]:
        ipaddress.ip_network(text)


def object_faults(objects: list[dict[str, Any]]) -> Iterator[str]:
    seen = collections.Counter(
        (obj["kind"], obj["metadata"].get("namespace"), obj["metadata"]["name"]) for obj in objects
    )
    yield from (f"{ident} stands there {count} times" for ident, count in seen.items() if count > 1)
    yield from (f"kind {obj['kind']}" for obj in objects if (obj["apiVersion"], obj["kind"]) not in KINDS)


def flow_faults(doc: dict[str, Any]) -> Iterator[str]:
    if not doc["flows"]:
        yield "no flow"
    known = backends(doc)
    labels = collections.Counter(
        (mode, flow["label"]) for flow in doc["flows"] for mode in flow.get("modes", doc["modes"])
    )
    yield from (f"label {label!r} twice in {mode}" for (mode, label), count in labels.items() if count > 1)
    for flow in doc["flows"]:
        where = f"flow {flow['label']!r}: "
        if set(flow.get("modes", [])) - set(doc["modes"]):
            yield where + "a mode that the file lacks"
        yield from (where + fault for fault in connection_faults(flow, {"label", "expect", "modes", "iface"}))
        yield from (where + fault for fault in expect_faults(flow["expect"], known, address(flow["to"]).version))


def connection_faults(raw: dict[str, Any], more: set[str]) -> Iterator[str]:
    yield from (f"lacks {key}" for key in sorted(CONNECTION - raw.keys()))
    yield from (f"unknown key {key}" for key in sorted(raw.keys() - CONNECTION - more))
    if address(raw["from"]).version != address(raw["to"]).version:
        yield "two families"
    if raw["proto"] not in ("TCP", "UDP", "SCTP") or not 0 < raw["port"] < 65536:
        yield "protocol or port"


def expect_faults(expect: Any, known: set[Socket], version: int) -> Iterator[str]:
    if isinstance(expect, str):
        if expect not in ("reject", "drop", "none"):
            yield f"expect {expect}"
        return
    if expect.keys() - {"masq_for"} != {"dnat", "masq"} or not expect["dnat"] or not isinstance(expect["masq"], bool):
        yield "expect is incomplete"
        return
    targets = [socket_of(target) for target in expect["dnat"]]
    if len(set(targets)) < len(targets):
        yield "one target twice"
    yield from (f"{target} is no endpoint of the objects" for target in targets if target not in known)
    yield from (f"{target} is of the other family" for target in targets if target[0].version != version)
    rewritten = {socket_of(target) for target in expect.get("masq_for", [])}
    if rewritten - set(targets) or (rewritten and expect["masq"]):
        yield "masq_for"


def step_faults(steps: list[dict[str, Any]]) -> Iterator[str]:
    for number, step in enumerate(steps):
        yield from (f"step {number}: {fault}" for fault in connection_faults(step, {"at", "pick", "modes", "iface"}))
        match = re.fullmatch(r"any|(?:same-as|differs-from)-(\d+)", step["pick"])
        if not match or (match[1] and int(match[1]) >= number):
            yield f"step {number}: pick {step['pick']}"
        if number and step["at"] < steps[number - 1]["at"]:
            yield f"step {number}: time goes back"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_file_is_well_formed(path: Path) -> None:
    assert list(faults(read(path), path.stem)) == []


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_file_loads(path: Path) -> None:
    loaded = scenario.load(path)
    assert loaded.name == path.stem
    assert len(loaded.objects) == len(read(path)["objects"])


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_source_cites_known_rows(path: Path) -> None:
    rows = rows_of(read(path))
    assert rows or path.stem in EXAMPLES
    assert len(set(rows)) == len(rows)
    known = index()
    assert [row for row in rows if int(row.split(".")[0]) in GROUPS and known.get(row) != "packets"] == []


def test_corpus_is_large_enough() -> None:
    assert len(PATHS) - len(EXAMPLES) >= FEWEST_FILES


def test_index_names_every_row_once() -> None:
    rows = INDEX_ROW.findall((FOLDER / "README.md").read_text(encoding="utf-8"))
    assert [row for row, _ in rows] == [f"{group}.{n}" for group, count in GROUPS.items() for n in range(1, count + 1)]


def test_index_has_the_sentences_of_the_page_of_behaviours() -> None:
    lines = (FOLDER.parents[1] / "docs/reference/behaviours.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ") for line in lines if line and not line.startswith("#")]
    published = {number: text for number, _, text, _ in rows}
    known = re.findall(
        r"^\| (\d+\.\d+) \| ([^|]+) \| [^|]+ \|$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [row for row, text in known if published[row] != text] == []


def test_every_row_that_packets_can_show_is_shown() -> None:
    shown = {row for path in PATHS for row in rows_of(read(path))}
    assert [row for row, seen in index().items() if seen == "packets" and row not in shown] == []


def test_every_quirk_names_the_file_with_our_answer() -> None:
    names = {path.stem for path in PATHS}
    quirks = [doc for doc in map(read, PATHS) if doc["level"] == "quirk"]
    assert quirks
    for doc in quirks:
        ours = re.search(r"see ([a-z0-9-]+)\.$", doc["summary"])
        assert ours, doc["name"]
        assert ours[1] in names


def test_both_families_and_all_protocols_are_there() -> None:
    flows = [(flow["proto"], address(flow["to"]).version) for path in PATHS for flow in read(path)["flows"]]
    assert set(flows) == {(proto, version) for proto in ("TCP", "UDP", "SCTP") for version in (4, 6)}


def faulty() -> dict[str, dict[str, Any]]:
    """One changed key each, and the check must see it."""
    return {
        "name": {"name": "another"},
        "mode": {"modes": ["ebpf"]},
        "level": {"level": "may"},
        "key": {"rows": ["1.1"]},
        "no flow": {"flows": []},
        "object twice": {"objects": [*BASE["objects"], BASE["objects"][0]]},
        "no endpoint": {"flows": [{**FLOW, "expect": {"dnat": ["10.64.1.99:80"], "masq": False}}]},
        "label twice": {"flows": [FLOW, FLOW]},
        "families": {"flows": [{**FLOW, "from": "fd64::1"}]},
        "word": {"flows": [{**FLOW, "expect": "refuse"}]},
        "masq_for": {"flows": [{**FLOW, "expect": {**FLOW["expect"], "masq_for": ["10.64.1.99:80"]}}]},
        "pick": {"steps": [{**STEP, "pick": "same-as-0"}]},
        "time": {"steps": [STEP, {**STEP, "at": -1}]},
    }


BASE = read(FOLDER / "affinity-hairpin.yaml")
FLOW = BASE["flows"][0]
STEP = BASE["steps"][0]


@pytest.mark.parametrize("change", faulty().values(), ids=faulty().keys())
def test_the_check_sees_a_fault(change: dict[str, Any]) -> None:
    assert list(faults({**BASE, **change}, "affinity-hairpin")) != []
