"""Apply one of the plans as a new process of the proxy does: `python -m tests.proxy.kernel.nft_killed NAMESPACE NUMBER`.

NARTHEX_FAILPOINT ends it between two writes.
"""

import sys

import msgspec
from tests.proxy.backends.nft_plans import (
    INTERNAL,
    after,
    everything,
    frontend,
    node_port,
    plan,
    pool,
    port_name,
    service,
)

from narthex.model.net import IPFamily
from narthex.proxy.backends.nftables.backend import NftablesBackend, NftRules
from narthex.proxy.kernel.nftables import NftablesTarget

FIRST = plan(
    everything(), service("old", frontend("10.96.0.9", 80, INTERNAL), node_port(30090, INTERNAL), cluster=pool(20, 21))
)
CHANGED = after(FIRST, service("old", frontend("10.96.0.9", 80, INTERNAL), cluster=pool(21, 22, 23), affinity=60))
SETTINGS = msgspec.structs.replace(CHANGED, masquerade_mark=0x8000)
PLANS = FIRST, CHANGED, SETTINGS, after(SETTINGS, removed=(port_name("web"), port_name("old"))), FIRST


def applied(namespace: str, number: int) -> tuple[NftRules | None, NftRules]:
    """Read the kernel, write the differences to a plan, and return what is there then, and what should be."""
    target = NftablesTarget(IPFamily.IPV4, namespace)
    rules = NftablesBackend().render(PLANS[number])
    target.apply(NftablesBackend().diff(target.read(), rules))
    there = target.read()
    target.close()
    return there, rules


if __name__ == "__main__":
    applied(sys.argv[1], int(sys.argv[2]))
