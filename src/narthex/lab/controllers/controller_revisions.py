"""Revisions of the pod templates of DaemonSets and StatefulSets (kubernetes `pkg/controller/history`), and hashes of templates.

`kubectl rollout history` and `kubectl rollout undo` read ControllerRevisions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from itertools import count
from typing import Any

import msgspec

from narthex.lab.controllers.cluster_state import ClusterState
from narthex.lab.controllers.objects import (
    ALPHABET,
    CreateObject,
    DeleteObject,
    Object,
    ObjectKey,
    UpdateObject,
    annotations_of,
    controlled_by,
    integer_or,
    is_terminating,
    key_of,
    labels_of,
    reference_to,
    spec_of,
)

HASH_LABEL = "controller-revision-hash"
"""Label of pods, and of a DaemonSet's ControllerRevisions."""
_OTHER_HASH_LABEL = "controller.kubernetes.io/hash"
"""Label of a StatefulSet's ControllerRevisions."""


def template_hash(template: Mapping[str, Any], collisions: int) -> str:
    """Return a label value, such as pod-template-hash, derived from the template and the collision count."""
    content = msgspec.json.encode([without_empty(template), collisions], order="deterministic")
    digits = int.from_bytes(hashlib.sha256(content).digest()[:4], "big")
    return "".join(ALPHABET[int(digit)] for digit in str(digits))


def without_empty(value: Any) -> Any:
    """Return the value without nulls and empty structures, which Go clients write for absent fields."""
    if isinstance(value, dict):
        kept = {name: without_empty(each) for name, each in value.items()}
        return {name: each for name, each in kept.items() if each is not None and each != {} and each != []}
    return [without_empty(each) for each in value] if isinstance(value, list) else value


class TemplateRevision(msgspec.Struct, frozen=True):
    """A revision of an owner's template."""

    name: str
    """Name of its ControllerRevision."""
    hash: str
    template: Mapping[str, Any]


class RevisionHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The revisions of an owner's template."""

    held: list[Object]
    """Its ControllerRevisions, oldest first."""
    present: TemplateRevision
    """The revision of its present template."""
    write: CreateObject | UpdateObject | None
    """The write that makes this the newest one; None if it is, or if the owner is terminating."""

    def surplus(self, owner: Object, in_use: Collection[str]) -> Iterator[DeleteObject]:
        """Yield the deletion of the oldest revisions that exceed `revisionHistoryLimit`. `in_use` are names."""
        old = [each for each in self.held if each["metadata"]["name"] not in in_use]
        limit = integer_or(spec_of(owner).get("revisionHistoryLimit"), 10)
        for each in old[: max(0, len(old) - limit)]:
            yield DeleteObject("ControllerRevision", key_of(each))


def revision_history(owner: Object, state: ClusterState) -> RevisionHistory:
    """Return the revisions of an owner's template."""
    held = _owned_revisions(owner, state)
    present, write = _present_revision(owner, held, state)
    return RevisionHistory(held=held, present=present, write=None if is_terminating(owner) else write)


def _owned_revisions(owner: Object, state: ClusterState) -> list[Object]:
    found = state.dependents_of_kind("ControllerRevision", owner)
    mine = (each for each in found if controlled_by(each, owner))
    return sorted(mine, key=lambda each: (integer_or(each.get("revision")), each["metadata"]["name"]))


def as_template(revision: Object) -> TemplateRevision:
    """Return the template that a ControllerRevision keeps."""
    kept = ((revision.get("data") or {}).get("spec") or {}).get("template") or {}
    template = {name: value for name, value in kept.items() if name != "$patch"}
    labels = labels_of(revision)
    return TemplateRevision(
        revision["metadata"]["name"], labels.get(HASH_LABEL) or labels.get(_OTHER_HASH_LABEL) or "", template
    )


def _present_revision(
    owner: Object, held: list[Object], state: ClusterState
) -> tuple[TemplateRevision, CreateObject | UpdateObject | None]:
    """Return the revision of the owner's present template, and the write that makes it the newest of those `held`."""
    template = spec_of(owner).get("template") or {}
    newest = integer_or(held[-1].get("revision")) if held else 0
    same = next((each for each in held if without_empty(as_template(each).template) == without_empty(template)), None)
    if same is not None:
        # A template that returns, as after a rollback, is the newest revision again.
        again = None if same is held[-1] else UpdateObject("ControllerRevision", {**same, "revision": newest + 1})
        return as_template(same), again
    key = key_of(owner)
    hashes = (template_hash(template, collisions) for collisions in count())
    chosen = next(
        each
        for each in hashes
        if state.get("ControllerRevision", ObjectKey(key.namespace, f"{key.name}-{each}")) is None
    )
    label = HASH_LABEL if owner["kind"] == "DaemonSet" else _OTHER_HASH_LABEL
    labels = {**((template.get("metadata") or {}).get("labels") or {}), label: chosen}
    made = {
        "metadata": {
            "name": f"{key.name}-{chosen}",
            "namespace": key.namespace,
            "labels": labels,
            **({"annotations": annotations_of(owner)} if annotations_of(owner) else {}),
            "ownerReferences": [reference_to(owner)],
        },
        "data": {"spec": {"template": {**template, "$patch": "replace"}}},
        "revision": newest + 1,
    }
    return TemplateRevision(f"{key.name}-{chosen}", chosen, template), CreateObject("ControllerRevision", made)
