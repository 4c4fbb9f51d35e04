"""The thread between a source and the loop."""

import queue
import threading

import pytest

from narthex.model.store import Synced, Upsert
from narthex.runtime import reconciler as feed_module
from narthex.runtime.reconciler import EventFeed
from narthex.testing.build import service


class Script:
    """A source that tells what the test hands it; an exception is raised."""

    def __init__(self):
        self.coming = queue.Queue()
        self.problems = ()

    def scan(self):
        return [Synced()]

    def changes(self, stop):
        while not stop.is_set():
            try:
                item = self.coming.get(timeout=0.01)
            except queue.Empty:
                continue
            if isinstance(item, Exception):
                raise item
            self.problems = (f"problem {item}",)
            yield item


@pytest.fixture
def noticed():
    return threading.Semaphore(0)


WEB = Upsert(service("shop/web", "10.110.0.1"))
CART = Upsert(service("shop/cart", "10.110.0.2"))


def test_the_first_scan_is_there_at_once(noticed):
    feed = EventFeed(Script())
    with feed.running(noticed.release):
        assert feed.take() == [Synced()]
        assert feed.take() == []


def test_changes_arrive_in_order_with_a_notice_each(noticed):
    source = Script()
    feed = EventFeed(source)
    with feed.running(noticed.release):
        source.coming.put([WEB])
        source.coming.put([CART])
        assert noticed.acquire(timeout=30) and noticed.acquire(timeout=30)
        assert feed.take() == [Synced(), WEB, CART]
        assert feed.problems == (f"problem {[CART]}",)


def test_watching_goes_on_after_a_fault(noticed, monkeypatch):
    monkeypatch.setattr(feed_module, "_AGAIN_SECONDS", 0.01)
    source = Script()
    feed = EventFeed(source)
    with feed.running(noticed.release):
        source.coming.put(RuntimeError("no watch left"))
        source.coming.put([WEB])
        assert noticed.acquire(timeout=30)
        assert feed.take()[-1] == WEB


def test_the_thread_ends_with_the_block(noticed):
    before = threading.active_count()
    with EventFeed(Script()).running(noticed.release):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
