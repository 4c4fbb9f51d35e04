"""Decoding costs a small multiple of what the json module alone takes for the same bytes, and each object once."""

import json
import time

import msgspec

from narthex.kube import watch as holdings
from narthex.kube.messages import DeadlineReached, LinesReceived, ResponseBody, ResponseOpened
from narthex.kube.resources import ENDPOINT_SLICES
from narthex.kube.watch import Watch
from narthex.lab.encode import encode
from narthex.testing.build import endpoint, endpoint_slice

SLICES, ENDPOINTS = 300, 10
MOST = 12.0
"""Times what json.loads takes; about 2 is usual, and machines are uneven."""


def raw(number):
    ends = [endpoint(f"10.64.{number % 250}.{index + 1}", target=f"pod-{number}-{index}") for index in range(ENDPOINTS)]
    made = encode(endpoint_slice(f"shop/s{number}", *ends))
    made["metadata"] |= {"resourceVersion": str(number + 1), "managedFields": [{"fieldsV1": {"f:endpoints": {}}}] * 5}
    return made


ITEMS = [raw(number) for number in range(SLICES)]
PAGE = msgspec.json.encode({"metadata": {"resourceVersion": "9999"}, "items": ITEMS})
LINES = [LinesReceived(msgspec.json.encode({"type": "ADDED", "object": item})) for item in ITEMS]
END = {"metadata": {"resourceVersion": "9999", "annotations": {"k8s.io/initial-events-end": "true"}}}


def listed():
    watch = Watch(ENDPOINT_SLICES, lambda: 0.5, streaming=False)
    watch.take(DeadlineReached(), 0.0)
    watch.take(ResponseOpened(), 0.0)
    return watch.take(ResponseBody(PAGE), 0.0).events


def streamed():
    watch = Watch(ENDPOINT_SLICES, lambda: 0.5)
    watch.take(DeadlineReached(), 0.0)
    watch.take(ResponseOpened(), 0.0)
    for line in LINES:
        assert not watch.take(line, 0.0).events
    return watch.take(LinesReceived(msgspec.json.encode({"type": "BOOKMARK", "object": END})), 0.0).events


def quickest(work):
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def test_decoding_costs_little_more_than_json():
    floor = quickest(lambda: json.loads(PAGE))
    for way in (listed, streamed):
        assert len(way()) == SLICES
        assert quickest(way) < MOST * floor, way.__name__


def test_each_object_is_decoded_once(monkeypatch):
    count = []

    def counting(decode):
        def counted(*arguments, **more):
            count.append(1)
            return decode(*arguments, **more)

        return counted

    for name in ("decode_json", "decode_shape"):
        monkeypatch.setattr(holdings, name, counting(getattr(holdings, name)))
    for way in (listed, streamed):
        count.clear()
        way()
        assert len(count) == SLICES
