"""Kills a Target at each failpoint of its mode, and lets a new one complete each plan:

    python -m tests.proxy.kernel.proxy_killed MODE NAMESPACE [PLANS]

Prints the number of kills by failpoint, and the plans that differ afterwards.
"""

import json
import os
import sys
import time
import traceback
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

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

from narthex.linux import failpoints
from narthex.linux.namespaces import in_namespace
from narthex.model.net import IPFamily
from narthex.proxy.backends.iptables import rules
from narthex.proxy.kernel.dataplanes import dataplane
from narthex.proxy.plan.ir import Plan

FIRST = plan(
    everything(), service("old", frontend("10.96.0.9", 80, INTERNAL), node_port(30090, INTERNAL), cluster=pool(20, 21))
)
CHANGED = after(FIRST, service("old", frontend("10.96.0.9", 80, INTERNAL), cluster=pool(21, 22, 23), affinity=60))
SETTINGS = msgspec.structs.replace(CHANGED, masquerade_mark=0x8000)
PLANS = FIRST, CHANGED, SETTINGS, after(SETTINGS, removed=(port_name("web"), port_name("old"))), FIRST
TOOLS = ("iptables", "xtables")
"""Programs that go on for a moment when the proxy is killed."""


def points_of(mode: str) -> list[str]:
    """Return the failpoints that a Target of the mode passes."""
    return [name for name in failpoints.POINTS if name.startswith(f"proxy.{mode}.")]


def bring(mode: str, namespace: str, desired: Plan) -> Any:
    """Read the kernel and write the differences to a plan, as a process does that starts; return what still differs."""
    plane = dataplane(mode)
    target, backend = plane.target(desired.family, namespace), plane.backend
    want = backend.render(desired)
    changes = backend.diff(target.read(), want)
    if changes:
        target.apply(changes)
    left = backend.diff(target.read(), want)
    target.close()
    return left


def killed(mode: str, namespace: str, desired: Plan, point: str, times: int) -> bool:
    """Bring the kernel to a plan in a process that a failpoint kills; return False if it was not passed so often."""
    child = os.fork()
    if child == 0:
        failpoints.arm(point, times)
        try:
            bring(mode, namespace, desired)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0, (point, times, status)
    while tools_at_work(namespace):
        time.sleep(0.02)
    return os.WIFSIGNALED(status)


def tools_at_work(namespace: str) -> bool:
    """Return True while a program that a killed process has started still writes in the namespace."""
    with in_namespace(namespace):
        own = Path("/proc/thread-self/ns/net").readlink()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name = (process / "comm").read_text()
            if name.startswith(TOOLS) and (process / "ns/net").readlink() == own:
                return True
        except OSError:
            continue
    return False


def main(mode: str, namespace: str, plans: tuple[Plan, ...]) -> None:
    rules.MOST_CHAINS = 8
    kills, differences = Counter[str](), []
    for point in points_of(mode):
        for number, desired in enumerate(plans):
            for times in count(1):
                if not killed(mode, namespace, desired, point, times):
                    break
                kills[point] += 1
                if left := bring(mode, namespace, desired):
                    differences.append(f"plan {number}, killed at {point} ({times}): {left}")
                # The next kill is in the same step from the plan before.
                bring(mode, namespace, plans[number - 1])
            bring(mode, namespace, desired)
        dataplane(mode).target(IPFamily.IPV4, namespace).clean()
    print(json.dumps({"kills": kills, "differences": differences}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], PLANS[: int(sys.argv[3])] if sys.argv[3:] else PLANS)
