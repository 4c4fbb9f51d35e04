"""Who listens, from `ss -H -l -n -t -u`."""

from __future__ import annotations

from narthex.model.net import FAMILIES, IPFamily, address, family_of
from narthex.trace.follow.views import ListeningSocket

_EVERY = {"*": FAMILIES, "0.0.0.0": (IPFamily.IPV4,), "[::]": (IPFamily.IPV6,)}
_MAPPED = "::ffff:"


def listeners_of(text: str) -> tuple[ListeningSocket, ...]:
    """One for each line that is understood: protocol, state, two queues, own address and port."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 5 or words[0] not in ("tcp", "udp"):
            continue
        place, _, port = words[4].rpartition(":")
        listener = _listener(words[0], place, port)
        if listener is not None:
            found.append(listener)
    return tuple(found)


def _listener(protocol: str, place: str, port: str) -> ListeningSocket | None:
    if not port.isascii() or not port.isdigit():
        return None
    # The link that an address is bound to stands behind it: 127.0.0.53%lo, fe80::1%eth0.
    bare = place.partition("%")[0]
    bare = bare if not bare.startswith("[") or bare.endswith("]") else f"{bare}]"
    if bare in _EVERY:
        return ListeningSocket(protocol, "", int(port), _EVERY[bare])
    try:
        held = address(bare.strip("[]").removeprefix(_MAPPED))
    except ValueError:
        return None
    return ListeningSocket(protocol, held, int(port), (family_of(held),))
