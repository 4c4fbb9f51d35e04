"""Taking a bundle: this node's tools, and the cluster's objects when somebody says where they are."""

from __future__ import annotations

import json

import msgspec

from narthex.trace.node.layout import CNI_DIRECTORY, CNI_FILE, FAILED, OBJECTS, PARTS, TAKEN, BundleManifest, PartStatus
from narthex.trace.node.scrub import scrubbed
from narthex.trace.program.gather import GatheredParts, gather


def take(node: str = "", namespace: str | None = None, kubeconfig: str = "", master: str = "") -> GatheredParts:
    """Take all that can be had; the table says what could not, and why."""
    gathered = gather(node, namespace)
    if not (kubeconfig or master):
        return gathered
    from narthex.kube.access import Access
    from narthex.kube.raw_lists import read_lists
    from narthex.runtime.configuration.values import ClientConnection

    lists = read_lists(Access(connection=ClientConnection(kubeconfig=kubeconfig), master=master))
    parts = dict(gathered.parts)
    taken = list(gathered.table.parts)
    for path, plural in OBJECTS.items():
        found = lists[plural]
        if isinstance(found, str):
            taken.append(PartStatus(path=path, status=FAILED, command=f"list {plural}", remark=found))
            continue
        parts[path] = json.dumps(scrubbed(plural, found))
        taken.append(PartStatus(path=path, status=TAKEN, command=f"list {plural}", bytes=len(parts[path])))
    table = msgspec.structs.replace(gathered.table, parts=tuple(taken))
    return GatheredParts(table=table, parts=parts)


def intended(kubeconfig: bool) -> BundleManifest:
    """What would be taken."""
    parts = [
        PartStatus(path=part.path, status="root" if part.root else "anyone", command=" ".join(part.command))
        for part in PARTS
    ]
    parts.append(PartStatus(path=CNI_FILE, status="anyone", command=f"ls {CNI_DIRECTORY}"))
    if kubeconfig:
        parts += [
            PartStatus(path=path, status="kubeconfig", command=f"list {plural}") for path, plural in OBJECTS.items()
        ]
    return BundleManifest(node="", writer="", parts=tuple(parts))
