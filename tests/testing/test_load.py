"""A load on a Service, here without one: what it counts must be the network's faults and none of its own."""

import threading

from narthex.testing.load import Load


class Line:
    """A kept connection that notices when two threads use it at once."""

    endpoint = "10.0.0.1:80"

    class way:
        label = "from a test"

    def __init__(self):
        self.used = 0
        self._busy = threading.Lock()

    def exchange(self):
        if not self._busy.acquire(blocking=False):
            raise ConnectionError("used by two threads at once")
        try:
            self.used += 1
            threading.Event().wait(0.001)
        finally:
            self._busy.release()

    def close(self):
        pass


def test_a_kept_connection_is_used_by_one_thread_at_a_time():
    load = Load([Line.way])
    load._call = lambda: None
    load.held = [line := Line()]
    with load.streaming(pause=0.0):
        for _ in range(50):
            load.exchange()
    assert line.used > 50
    assert load.failures == []
