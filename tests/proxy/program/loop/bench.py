"""A proxy with everything around it replaced by fakes."""

import math
from collections.abc import Sequence

import pytest

from narthex.linux.monitor import RulePoller
from narthex.model.net import FAMILIES, IPFamily
from narthex.model.objects import AnyObject, Node
from narthex.netfilter.ast import TouchedPart
from narthex.proxy.plan.ir import Plan
from narthex.proxy.plan.planner import Planner
from narthex.proxy.program.dataplane import AnnouncedTarget
from narthex.proxy.program.loop import Proxy
from narthex.proxy.program.schedule import SyncPeriods
from narthex.proxy.program.sync import FamilySync
from narthex.testing.build import CONFIG, NODE, endpoint, endpoint_slice, service
from narthex.testing.fakes import FakeBackend, FakeChanges, FakeClock, FakeInbox, FakeRules, FakeTarget

WEB = service("shop/web", "10.110.0.1", "fd6e::1")
WEB_SLICE = endpoint_slice("shop/web", endpoint("10.64.1.5"))
WEB_LINE = ("10.110.0.1:80/TCP", "shop/web:http -> 10.64.1.5:80")
CART = service("shop/cart", "10.110.0.2")
CART_SLICE = endpoint_slice("shop/cart", endpoint("10.64.1.6"))
THE_NODE = Node(name=NODE, internal_ips=("10.20.0.11",))


class Announcements(RulePoller):
    """Names the parts that others touched."""

    parts: frozenset[TouchedPart] | None = None

    def touched(self, family: IPFamily) -> frozenset[TouchedPart] | None:  # noqa: ARG002
        return self.parts


class Bench:
    """A proxy with everything around it faked."""

    def __init__(
        self,
        *objects: AnyObject,
        families: Sequence[IPFamily] = FAMILIES,
        minimum: float = 0.0,
        rules: FakeRules | None = None,
        watched: bool = False,
        target: type[FakeTarget[FakeRules, FakeChanges]] = FakeTarget,
    ) -> None:
        self.clock = FakeClock()
        self.others = 0
        self.inbox = FakeInbox(THE_NODE, *objects)
        backend = FakeBackend()
        self.targets = {family: target(backend, FakeRules(), rules) for family in families}
        syncs = [
            FamilySync(family, Planner(CONFIG, family), backend, self.targets[family], self.clock)
            for family in families
        ]
        self.foreign = Announcements(self.generation, families) if watched else None
        if self.foreign:
            for sync in syncs:
                sync._target = AnnouncedTarget(sync._target, self.foreign, lambda _: 1)
        self.proxy = Proxy(
            self.inbox,
            syncs,
            self.clock,
            SyncPeriods(minimum, watched=watched),
            node_name=NODE,
            foreign=self.foreign,
            follow=self.follow,
        )
        self.followed: list[tuple[Plan, bool]] = []
        self.again = math.inf

    def generation(self) -> int:
        """As the kernel counts: one for each transaction of anybody."""
        return self.others + sum(len(target.applied) for target in self.targets.values())

    def follow(self, plan: Plan) -> float:
        self.followed.append((plan, bool(self.targets[plan.family].applied)))
        return self.again

    @property
    def kernel(self) -> dict[str, str]:
        rules = self.targets[IPFamily.IPV4].rules
        assert rules is not None
        return dict(rules.lines)

    @property
    def writes(self) -> int:
        return len(self.targets[IPFamily.IPV4].applied)

    def change(self, *objects: AnyObject) -> None:
        """Objects change and the watch says so."""
        self.inbox.put(*objects)
        self.proxy.notice()

    def run_for(self, seconds: float) -> None:
        """Let the loop turn until this much time has passed."""
        end = self.clock.now() + seconds
        while True:
            wait = self.proxy.turn()
            if self.clock.now() + wait > end:
                self.clock.advance(end - self.clock.now())
                return
            self.clock.sleep(wait)


def said(log: pytest.LogCaptureFixture, text: str, level: str | None = None) -> list[str]:
    """Return the messages that contain a text, of one level if it is given."""
    return [
        record.getMessage()
        for record in log.records
        if text in record.getMessage() and (level is None or record.levelname == level)
    ]
