"""What to write so that an owner's EndpointSlices of one family hold what they should."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from narthex.lab.controllers.endpoints import Group
from narthex.lab.controllers.objects import controlled_by, key_of, labels_of, leaving, letters, reference_to
from narthex.lab.controllers.packing import pack
from narthex.lab.controllers.present import SERVICE_NAME, Present
from narthex.lab.controllers.view import Create, Delete, Key, Object, Update

MANAGED_BY = "endpointslice.kubernetes.io/managed-by"


class SliceWriter:
    """Writes the slices of one manager, and gives new ones names that were not given before."""

    def __init__(self, manager: str) -> None:
        self.manager = manager
        self._made: dict[Key, int] = {}

    def mine(self, owner: Object, service: Key, present: Present) -> list[Object]:
        """The slices of a Service that this manager made for `owner`."""
        return [
            each
            for each in present.slices_of(service)
            if labels_of(each).get(MANAGED_BY) == self.manager and controlled_by(each, owner) and not leaving(each)
        ]

    def write(
        self, owner: Object, labels: Mapping[str, str], family: str, wanted: Sequence[Group], existing: Sequence[Object]
    ) -> Iterator[Create | Update | Delete]:
        """The writes that make of the existing slices of this family the wanted endpoints. `labels`: those that the slices
        have besides what names their Service and manager."""
        labels = {**labels, SERVICE_NAME: owner["metadata"]["name"], MANAGED_BY: self.manager}
        packed = pack(wanted, existing)
        free = list(packed.empty)
        for old, ports, endpoints in packed.filled:
            content = {"ports": list(ports), "endpoints": list(endpoints)}
            if old is None and free:
                # What would be deleted takes what would be made.
                old = free.pop(0)
            if old is None:
                yield Create("EndpointSlice", self._new(owner, family, labels, content))
                continue
            same = labels_of(old) == labels and all((old.get(name) or []) == value for name, value in content.items())
            if not same:
                yield Update("EndpointSlice", {**old, "metadata": {**old["metadata"], "labels": labels}, **content})
        yield from (delete(each) for each in free)

    def _new(self, owner: Object, family: str, labels: Mapping[str, str], content: Object) -> Object:
        key = key_of(owner)
        self._made[key] = self._made.get(key, 0) + 1
        end = letters(f"{self.manager} {key} {owner['metadata'].get('uid')} {self._made[key]}", 5)
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{key.name}-"[:58] + end,
                "generateName": f"{key.name}-",
                "namespace": key.namespace,
                "labels": dict(labels),
                "ownerReferences": [reference_to(owner)],
            },
            "addressType": family,
            **content,
        }


def delete(slice_: Object) -> Delete:
    """The end of a slice."""
    key = key_of(slice_)
    return Delete("EndpointSlice", key.namespace, key.name)
