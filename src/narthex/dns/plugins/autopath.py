"""The search list walked here instead of in the pod (row S18): which names a question stands for.

A pod's resolver asks `redis.default.NAMESPACE.svc.ZONE` first, hears that there is no such name, and asks on with the
next zone of its list. Who knows the list can go through it at once. It is known for sure only when the question ends in
the list's first zone, which holds the namespace of the pod that asks.
"""

from __future__ import annotations

from collections.abc import Sequence

from narthex.dns.message import names

_SVC = b"\x03svc"


def search_list(namespace: bytes, zone: bytes, others: Sequence[bytes]) -> tuple[bytes, ...]:
    """The list that a kubelet gives a pod (row S22). `namespace` is a label in wire form, `zone` the cluster's, `others`
    the node's own search list; lower case."""
    return tuple(dict.fromkeys((namespace + _SVC + zone, _SVC + zone, zone, *others)))


def steps(name: bytes, search: Sequence[bytes]) -> tuple[bytes, ...]:
    """The names to try after `name` itself (lower case), the bare one last; none when `name` is no name of the list's
    first zone, or nothing but that zone."""
    if not search or name == search[0] or not names.within(name, search[0]):
        return ()
    bare = name[: -len(search[0])]
    tried = (bare + zone for zone in (*search[1:], names.ROOT))
    return tuple(dict.fromkeys(each for each in tried if len(each) <= names.LONGEST))
