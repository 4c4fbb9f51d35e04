"""What `kubectl narthex` does in a cluster, through the `kubectl` of the user: list objects, and collect the state of nodes."""

from __future__ import annotations

import json
import secrets
import signal
import tempfile
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from msgspec.structs import replace

from narthex.kube.kubectl import LISTED, Kubectl, KubectlError
from narthex.model import Snapshot
from narthex.trace.node.collectors import OWNER, OWNER_LABEL, RUN_LABEL, NodeCollector, collector_pod
from narthex.trace.node.layout import OBJECTS, TAKEN, PartStatus
from narthex.trace.node.layout import script as script_text
from narthex.trace.program.bundle import Bundle, read_bundle, scrubbed, write_file
from narthex.trace.program.places import CLUSTER_DOMAIN, ask

_READY_SECONDS = 60
_KINDS = {"Service": "services", "EndpointSlice": "endpointslices", "Node": "nodes", "Pod": "pods"}
MOST_NODES = 8
"""Nodes whose state one command collects, unless they are named."""


class ClusterListing(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of a cluster."""

    parts: dict[str, str]
    """Lists as in a bundle, by path."""
    pods: tuple[dict[str, Any], ...]
    """All pods, as the server showed them."""
    nodes: tuple[str, ...]
    snapshot: Snapshot


def read_listing(text: str) -> ClusterListing:
    """Read the output of `Kubectl.objects`. Raises KubectlError."""
    from narthex.trace.program.travel import objects_of

    try:
        items = json.loads(text)["items"]
    except (ValueError, KeyError, TypeError) as error:
        raise KubectlError(f"the output of kubectl get cannot be read: {error}") from error
    parts: dict[str, str] = {}
    for path, plural in OBJECTS.items():
        own = [item for item in items if _KINDS.get(item.get("kind")) == plural]
        if plural in LISTED:
            kind, version = (own[0]["kind"], own[0]["apiVersion"]) if own else ("", "v1")
            parts[path] = json.dumps(scrubbed(plural, {"kind": f"{kind}List", "apiVersion": version, "items": own}))
    return ClusterListing(
        parts=parts,
        pods=tuple(item for item in items if item.get("kind") == "Pod"),
        nodes=tuple(sorted(item["metadata"]["name"] for item in items if item.get("kind") == "Node")),
        snapshot=objects_of(parts, "cluster").snapshot,
    )


def nodes_of_path(listing: ClusterListing, source: str, destination: str, domain: str, named: str) -> tuple[str, ...]:
    """Return the nodes that a packet may pass: the sender's, those of the destination, and those of its endpoints.

    Raises TraceError for a sender or a destination that the cluster does not have.
    """
    from narthex.trace.program.travel import KnownCluster

    places = KnownCluster(views=(), snapshot=listing.snapshot, has_objects=True).places()
    sender, target, _ = ask(places, source, destination, domain or CLUSTER_DOMAIN)
    found = dict.fromkeys([named] if named else [])
    owners = [place for ip in (*sender.addresses, *target.addresses) if (place := places.at(ip)) is not None]
    for node in (sender.node, target.node, *(place.node for place in owners)):
        found |= {node: None} if node else {}
    service = target.service or next((one for ip in target.addresses if (one := places.of(ip)) is not None), None)
    if service is not None:
        held = listing.snapshot.slices.get(service.key)
        for node in (one.node_name for each in (held or {}).values() for one in each.endpoints):
            found |= {node: None} if node else {}
    # A packet from outside to a Service that has no endpoints enters by any node.
    return tuple(node for node in found or listing.nodes[:1] if node in listing.nodes)[:MOST_NODES]


def new_run() -> str:
    """Return a name for a run that no other one has."""
    return secrets.token_hex(4)


class _Terminated(BaseException):
    """SIGTERM arrived."""


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise _Terminated


@contextmanager
def collected(
    kubectl: Kubectl,
    listing: ClusterListing,
    chosen: Sequence[NodeCollector],
    run_name: str,
    image: str,
    without: Container[str] = (),
) -> Iterator[tuple[Path, ...]]:
    """Collect the state of nodes, and yield a bundle with the objects for each. All files are removed afterwards.

    A script leaves out the parts `without`. Pods for the moment are deleted before the block begins, whatever happens, also after SIGINT and SIGTERM. Raises KubectlError if
    one cannot be deleted.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with tempfile.TemporaryDirectory(prefix="kubectl-narthex-") as directory:
            yield tuple(_bundles(kubectl, listing, chosen, run_name, image, without, Path(directory)))
    except _Terminated:
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _bundles(
    kubectl: Kubectl,
    listing: ClusterListing,
    chosen: Sequence[NodeCollector],
    run_name: str,
    image: str,
    without: Container[str],
    directory: Path,
) -> Iterable[Path]:
    new = [each for each in chosen if each.kind == "new"]
    try:
        with ThreadPoolExecutor(max_workers=MOST_NODES) as workers:
            found = list(workers.map(lambda each: _collect(kubectl, each, run_name, image, without), chosen))
    finally:
        if new:
            delete_pods(kubectl, new, run_name)
    for collector, data in zip(chosen, found, strict=True):
        path = directory / f"{collector.node}.tgz"
        path.write_bytes(data)
        bundle = read_bundle(path)
        path.unlink()
        yield _written(path, bundle, collector.node, listing)


def _written(path: Path, bundle: Bundle, node: str, listing: ClusterListing) -> Path:
    """Write a bundle with the node's name in the cluster, and with the objects."""
    objects = listing.parts
    statuses = tuple(
        PartStatus(path=part, status=TAKEN, command="kubectl get", bytes=len(text)) for part, text in objects.items()
    )
    kept = tuple(part for part in bundle.table.parts if part.path not in OBJECTS)
    parts = {name: text for name, text in bundle.parts.items() if name not in OBJECTS and name != "manifest.tsv"}
    write_file(path, replace(bundle.table, node=node, parts=(*kept, *statuses)), {**parts, **objects})
    return path


def _collect(kubectl: Kubectl, collector: NodeCollector, run_name: str, image: str, without: Container[str]) -> bytes:
    """Return the bundle of one node. Raises KubectlError."""
    if collector.kind == "new":
        kubectl.text("create", "-f", "-", stdin=json.dumps(collector_pod(collector, run_name, image)))
        ready = ("--for=condition=Ready", f"--timeout={_READY_SECONDS}s")
        kubectl.text("wait", "-n", collector.namespace, f"pod/{collector.pod}", *ready)
    stdin = "" if collector.kind == "narthex" else script_text(without)
    return kubectl.data(*collector.exec_words, stdin=stdin)


def delete_pods(kubectl: Kubectl, new: Sequence[NodeCollector], run_name: str) -> None:
    """Delete the pods of a run, and make sure that none is left. A second SIGINT does not prevent it. Raises KubectlError."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for namespace in {each.namespace for each in new}:
            chosen = ("-n", namespace, "-l", f"{OWNER_LABEL}={OWNER},{RUN_LABEL}={run_name}")
            kubectl.text("delete", "pods", *chosen, "--grace-period=0", "--force", "--wait=true", "--timeout=60s")
            left = kubectl.text("get", "pods", *chosen, "-o", "name").split()
            if left:
                names = " ".join(left)
                raise KubectlError(f"these are left: {names}; delete them: kubectl delete -n {namespace} {names}")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def list_announcements(kubectl: Kubectl) -> str:
    """Return the objects that decide who announces load balancer addresses, as a List in JSON. Raises KubectlError."""
    items = json.loads(kubectl.text("get", "services,endpointslices,nodes", "--all-namespaces", "-o", "json"))["items"]
    for kind in ("ipaddresspools.metallb.io", "l2advertisements.metallb.io"):
        try:
            items += json.loads(kubectl.text("get", kind, "--all-namespaces", "-o", "json"))["items"]
        except KubectlError as error:
            if "the server doesn't have a resource type" not in str(error):
                raise
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def qualified(text: str, namespace: str, snapshot: Snapshot) -> str:
    """Return the name of a pod or Service with the namespace that kubectl would use; other names as they are."""
    name, colon, rest = text.partition(":")
    if not namespace or not name or "/" in name or "." in name or (colon and ":" in rest) or name == "outside":
        return text
    if any(key.name == name for key in snapshot.nodes):
        return text
    return f"{namespace}/{text}"
