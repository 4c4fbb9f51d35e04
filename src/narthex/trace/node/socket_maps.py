"""Socket maps of other programs in what `bpftool map dump` and `bpftool map show` print: recognized, and not explained.

Cilium's names are those of its datapath (bpf/lib/lb.h). bpftool prints at most the first 15 characters of a name.
"""

from __future__ import annotations

import re

CILIUM_MAPS = (
    "cilium_lb4_services_v2",
    "cilium_lb6_services_v2",
    "cilium_lb4_backends_v2",
    "cilium_lb6_backends_v2",
    "cilium_lb4_backends_v3",
    "cilium_lb6_backends_v3",
    "cilium_lb4_reverse_nat",
    "cilium_lb6_reverse_nat",
    "cilium_lb4_reverse_sk",
    "cilium_lb6_reverse_sk",
    "cilium_lb4_affinity",
    "cilium_lb6_affinity",
    "cilium_lb_affinity_match",
    "cilium_lb4_source_range",
    "cilium_lb6_source_range",
    "cilium_lb4_health",
    "cilium_lb6_health",
    "cilium_lb4_maglev",
    "cilium_lb6_maglev",
    "cilium_skip_lb4",
    "cilium_skip_lb6",
)
"""Maps that Cilium's programs for sockets, or those that share its Service tables, read."""
_SHOWN = 15
_WORD = re.compile(r"\bcilium_(?:lb|skip_lb)[a-z0-9_]*", re.ASCII)
_SERVICE_FIELDS = ("backend_slot", "rev_nat_index")
"""Fields of a Cilium Service table that a dump with type information has in each element, and its file's name may not tell."""


def foreign_socket_maps(file: str, text: str) -> tuple[str, ...]:
    """Return the names of Cilium's maps that a file is named after or mentions, sorted.

    A name that bpftool has cut stands for each map that it may be.
    """
    found: set[str] = set()
    # The expression is slow for a dump of 200,000 rules.
    for word in (*_WORD.findall(file), *(_WORD.findall(text) if "cilium_" in text else ())):
        found.update(name for name in CILIUM_MAPS if name == word or (len(word) == _SHOWN and name.startswith(word)))
    if not found and all(f'"{field}"' in text for field in _SERVICE_FIELDS):
        found.add("cilium_lb4_services_v2 or cilium_lb6_services_v2")
    return tuple(sorted(found))


def foreign_maps_message(file: str, names: tuple[str, ...]) -> str:
    """Return what a reader has to know about such a file."""
    return (
        f"{file}: socket load balancing of Cilium ({', '.join(names)}): it may send sockets to endpoints before rules see a"
        " packet, and is not explained; ask `cilium-dbg service list`"
    )
