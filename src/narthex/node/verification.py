"""The verifier of the proxy's change sets: the proof of what they lead to, with the addresses of this node."""

from __future__ import annotations

from typing import Any

from narthex.linux.addresses import own_addresses
from narthex.model import Host, IPFamily, contains
from narthex.proxy.backends.base import Backend
from narthex.proxy.verification import ChangeVerifier


def change_verifier(family: IPFamily, backend: Backend[Any, Any]) -> ChangeVerifier[Any, Any]:
    """Return the verifier of one IP family for the network namespace of the calling thread."""
    # Imported here: a proxy that does not verify needs none of it.
    from narthex.trace.proof.incremental import IncrementalProof

    def host() -> Host:
        """Return the node's own addresses of the family, without those of loopback and those of links alone.

        The latter come and go with pods. To rules and to the plan they are addresses like any others that a node has.
        """
        addresses = (own.address for own in own_addresses() if own.family is family)
        return Host(
            addresses=tuple(sorted(each for each in addresses if not any(contains(net, each) for net in left_out)))
        )

    left_out = (family.loopback, *(("fe80::/10",) if family is IPFamily.IPV6 else ()))

    return IncrementalProof(backend, host)
