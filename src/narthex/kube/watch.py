"""The watch protocol of one list as a state machine: which request follows which response. Pure.

    list (pages) ─ complete ─> watch ─ ended or lost ─> watch from the last version seen
    WatchList ─ initial-events-end ─> watch, on the same stream
    version expired, server restored from a backup, relist period over ─> list again

A driver sends the requests and reports each input with its time. Requests are aborted at `wake_at` if nothing arrived
until then. Whatever fails, no object is dropped before a complete list lacks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import msgspec

from narthex.kube.messages import (
    TYPES,
    WATCH_TIMES,
    ApiStatus,
    BytesReceived,
    DeadlineReached,
    LinesReceived,
    MalformedResponse,
    RequestRefused,
    ResponseBody,
    ResponseOpened,
    StreamEnded,
    WatchCounts,
    WatchEvent,
    WatchInput,
    WatchRequest,
    WatchStep,
    WatchTimes,
    is_older,
    read_lines,
    read_page,
    read_status,
    version_of,
)
from narthex.kube.resources import WatchedResource
from narthex.model import AnyObject, Delete, Event, EventProblem, NamespacedName, Problem, ProblemList, Upsert, quoted
from narthex.model.decode.objects import Decoded, decode_json, decode_shape, shape_of
from narthex.model.wire import AnyWire

_GO_ON = WatchStep()


class _Phase(Enum):
    BACKING_OFF = "waits before the next request"
    LISTING = "reads a list"
    STREAMING = "reads a streaming list"
    WATCHING = "watches"
    PROBING = "asks whether the server still has the version"
    ABSENT = "the server does not have it"


PAGE_OBJECTS = 500
_ANY, _NEWEST = "0", ""
"""Versions to list at: what the server has at hand; what is true now, which costs it more."""
_HINTS = {401: "; check the credentials", 403: "; what a proxy needs is in deploy/rbac.yaml"}
_KUBELET = 'User "system:node:'
"""Part of the messages to kubelets' accounts. The Node authorizer never lets them list these objects."""
_KUBELET_HINT = (
    "; this is a kubelet's account: use the credentials of the proxy on this node (docs/howto/check-a-node.md)"
)
_SOME_OBJECTS = 2
"""A list that had at least this many objects is not believed to be empty."""
_WORKED_SECONDS = 0.5
"""A watch that lasted this long before the server ended it, or that brought a change, worked."""
_MOST_WORKED = 2
"""The end of a watch that worked counts for at most this many failures: the next one follows within 1.2 s."""
_PATIENCE = 3
"""Consecutive failures after which another kind of request is tried."""


class _WatchStart(NamedTuple):
    """The beginning of the present watch."""

    at: float = math.inf
    """Infinite until the server answers."""
    events: int = 0
    """Number of changes before it."""


class Watch:
    """The state machine of one list. `take` is its only input."""

    def __init__(
        self,
        resource: WatchedResource,
        random: Callable[[], float],
        times: WatchTimes = WATCH_TIMES,
        *,
        streaming: bool = True,
        newest: bool = False,
    ) -> None:
        """Prepare a watch of `resource`.

        `random` returns random numbers from 0 to 1, for jitter. `streaming` tries WatchList first. `newest` makes the
        first list a consistent read instead of a read from the server's cache.
        """
        self.resource = resource
        self.counts = WatchCounts()
        self._shape = shape_of(resource.kind) if resource.decode is None else msgspec.Raw
        self.cache = ListCache(resource.kind, resource.decode)
        self.synced = False
        """A list has been complete once, or the server lacks it."""
        self.wake_at = -math.inf
        self.trouble: Problem | None = None
        """The reason why the list cannot be kept up to date at present."""
        self.doubted_at: float | None = None
        """When the server first sent the list that is doubted at present (`WatchTimes.doubt`)."""
        self._random = random
        self._times = times
        self._streaming = streaming
        """False once the server has refused WatchList."""
        self._stream_failed = False
        """WatchList failed since the last complete list."""
        self._path = 0
        self._fields_known = True
        self._phase = _Phase.BACKING_OFF
        self._version = ""
        """The cache reflects all changes up to this version."""
        self._floor = _NEWEST if newest else _ANY
        """The oldest version that the next list may have."""
        self._paging = False
        """The running request is for a page after the first."""
        self._whole = False
        """The next list is read without pages, since a continue token expired."""
        self._fresh = ListCache(resource.kind, resource.decode)
        self._start = _WatchStart()
        self._closes_at = math.inf
        self._has_bookmarks = False
        self._relist_at = math.inf
        self._failures = 0
        self._then_list = True

    def take(self, input: WatchInput, now: float) -> WatchStep:
        """Process one input at `now`, in seconds of a monotonic clock, and return the reaction."""
        try:
            match input:
                case LinesReceived(data):
                    return self._lines(data, now)
                case BytesReceived():
                    self._heard(now)
                    return _GO_ON
                case ResponseOpened():
                    return self._opened(now)
                case ResponseBody(data):
                    return self._page(data, now)
                case RequestRefused(code, body, retry_after):
                    return self._refused(read_status(body, code), retry_after, now)
                case StreamEnded(reason):
                    return self._ended(reason, now)
                case DeadlineReached():
                    return self._due(now)
        except MalformedResponse as error:
            return self._garbled(error, now)

    # Asking

    def _list(self, now: float, *, page: str = "") -> WatchStep:
        """Request the list, or its next page."""
        self.wake_at = now + self._times.list_silence
        self._paging = bool(page)
        if page:
            return WatchStep(request=self._request({"limit": str(PAGE_OBJECTS), "continue": page}), over=True)
        self._fresh = ListCache(self.resource.kind, self.resource.decode)
        if self._streaming and not self._stream_failed:
            self._phase = _Phase.STREAMING
            self.wake_at = now + self._times.stream_silence
            return WatchStep(request=self._watch_request(now, self._floor, initial=True), over=True)
        self._phase = _Phase.LISTING
        query = {}
        # A limit together with a version would ask for exactly that version; and caches answer without a limit only.
        if self._floor in (_ANY, _NEWEST) and not self._whole:
            query["limit"] = str(PAGE_OBJECTS)
        if self._floor != _NEWEST:
            query["resourceVersion"] = self._floor
        if self._floor not in (_ANY, _NEWEST):
            query["resourceVersionMatch"] = "NotOlderThan"
        return WatchStep(request=self._request(query), over=True)

    def _watch(self, now: float) -> WatchStep:
        """Request the changes since the last version seen."""
        self._phase = _Phase.WATCHING
        self._start = _WatchStart()
        request = self._watch_request(now, self._version, initial=False)
        self.wake_at = min(now + self._times.list_silence, self._relist_at)
        return WatchStep(request=request, over=True)

    def _probe(self, now: float) -> WatchStep:
        """Request one object at the watched version.

        A server that was restored from a backup answers that the version is too large. An idle server may be silent
        for long, and a full list would be an unnecessary load.
        """
        self._phase = _Phase.PROBING
        self.wake_at = now + self._times.list_silence
        query = {"limit": "1", "resourceVersion": self._version, "resourceVersionMatch": "NotOlderThan"}
        return WatchStep(
            request=WatchRequest(self.resource.paths[self._path], tuple(query.items()), lines=False), over=True
        )

    def _watch_request(self, now: float, version: str, *, initial: bool) -> WatchRequest:
        # Not all watches of all nodes are to end at the same moment.
        seconds = math.ceil(self._times.watch * (1 + self._random()))
        self._closes_at = now + seconds + self._times.watch_grace
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        if initial:
            query |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        if version:
            query["resourceVersion"] = version
        return self._request(query, lines=True)

    def _request(self, query: dict[str, str], *, lines: bool = False) -> WatchRequest:
        if self.resource.labels:
            query["labelSelector"] = self.resource.labels
        fields = [self.resource.fields, self.resource.fields_if_known if self._fields_known else ""]
        if any(fields):
            query["fieldSelector"] = ",".join(filter(None, fields))
        return WatchRequest(self.resource.paths[self._path], tuple(query.items()), lines)

    # Answers

    def _opened(self, now: float) -> WatchStep:
        self._heard(now)
        if self._phase is _Phase.WATCHING:
            self._begin(now)
            self.trouble = self._doubt()
        return _GO_ON

    def _begin(self, now: float) -> None:
        """Count a watch that the server has accepted."""
        self.counts.watches += 1
        self._start = _WatchStart(now, self.counts.events)

    def _heard(self, now: float) -> None:
        """Extend the timeout after a sign of life."""
        self.counts.heard += 1
        if self._phase is not _Phase.WATCHING:
            streaming = self._phase is _Phase.STREAMING
            self.wake_at = now + (self._times.stream_silence if streaming else self._times.list_silence)
            return
        silence = now + self._times.bookmark_silence if self._has_bookmarks else math.inf
        self.wake_at = min(self._closes_at, silence, self._relist_at)

    def _page(self, data: bytes, now: float) -> WatchStep:
        page = read_page(data)
        if self._phase is _Phase.PROBING:
            if is_older(page.metadata.version, self._version):
                self._floor = _NEWEST
                return self._list(now)
            return self._watch(now)
        for item in page.items or ():
            self._fresh.put(item)
        if page.metadata.next:
            return self._list(now, page=page.metadata.next)
        events = self._complete(page.metadata.version, now)
        return WatchStep(events, self._watch(now).request, over=True)

    def _complete(self, version: str, now: float) -> tuple[Event, ...]:
        """Replace the cache by a complete list."""
        if self._floor != _NEWEST and is_older(version, self._floor):
            # Another server, that lags behind. If it is the newest there is, asking for the newest will show.
            self._floor = _NEWEST
            raise MalformedResponse(f"the list is of version {version}, older than what is known already")
        self._judge(version, now)
        events = self.cache.replace(self._fresh, keep_missing=self.doubted_at is not None)
        self._fresh = ListCache(self.resource.kind, self.resource.decode)
        self._version = self._floor = version
        self._whole = self._stream_failed = False
        self.synced = True
        self.trouble = self._doubt()
        self.counts.lists += 1
        share = 1 + len(self.cache) / self._times.relist_objects
        self._relist_at = now + self._times.relist * share * (0.9 + 0.2 * self._random())
        if self.doubted_at is not None:
            self._relist_at = now + self._times.doubt_relist
        return tuple(events)

    def _judge(self, version: str, now: float) -> None:
        """Decide whether objects stay that the new list lacks.

        A server whose data was lost or restored sends a list that is older or empty, and status 200. If it stays that
        way, the list takes effect in the end. Deletions that the watch reports take effect at once.
        """
        missing = self.cache.missing(self._fresh)
        if not missing:
            self.doubted_at = None
        elif self.doubted_at is not None:
            if now >= self.doubted_at + self._times.doubt:
                self.doubted_at = None
        elif is_older(version, self._version) or (not len(self._fresh) and len(self.cache) >= _SOME_OBJECTS):
            self.doubted_at = now
            self.counts.failures["doubted"] += 1

    def _doubt(self) -> Problem | None:
        if self.doubted_at is None:
            return None
        return EventProblem(
            object=f"API server, {self.resource.paths[self._path]}",
            message=(
                "the server has lost objects: its list is older than what is known, or empty; the objects stay in force "
                f"for {self._times.doubt:g} s unless the server reports that they were deleted"
            ),
            reason="ObjectsMissingFromList",
        )

    def _lines(self, data: bytes, now: float) -> WatchStep:
        """Process lines up to the one that ends the watch, if any."""
        events: list[Event] = []
        self._heard(now)
        try:
            for event in read_lines(data, self._shape):
                step = self._process_event(event, now)
                events += step.events
                if step.over:
                    break
            else:
                return WatchStep(tuple(events)) if events else _GO_ON
        except MalformedResponse as error:
            step = self._garbled(error, now)
        return WatchStep((*events, *step.events), step.request, over=True) if events else step

    def _process_event(self, event: WatchEvent[Any], now: float) -> WatchStep:
        if event.type == "ERROR":
            return self._refused(read_status(event.object), None, now)
        if event.type not in TYPES:
            raise MalformedResponse(f"the watch has an event of type {quoted(event.type)}")
        if event.type == "BOOKMARK" and not self._has_bookmarks:
            self._has_bookmarks = True
            self._heard(now)
        if self._phase is _Phase.STREAMING:
            return self._initial(event.type, event.object, now)
        version, _ = version_of(event.object)
        if is_older(version, self._version):
            self._floor = _NEWEST
            return self._back_off("older", f"the server went back from version {self._version} to {version}", now)
        change = None
        if event.type == "BOOKMARK":
            self.counts.bookmarks += 1
        else:
            change = self._change(self.cache, event.type, event.object)
            self.counts.events += 1
        self._version = self._floor = version
        return WatchStep((change,)) if change is not None else _GO_ON

    def _initial(self, type: str, object: Any, now: float) -> WatchStep:
        """Process one event of the initial list of WatchList."""
        if type != "BOOKMARK":
            self._change(self._fresh, type, object)
            return _GO_ON
        version, ends_list = version_of(object)
        if not ends_list:
            return _GO_ON
        events = self._complete(version, now)
        self._phase = _Phase.WATCHING
        self._begin(now)
        self._heard(now)
        return WatchStep(events)

    @staticmethod
    def _change(cache: ListCache, type: str, object: Any) -> Event | None:
        return cache.drop(object) if type == "DELETED" else cache.put(object)

    # What goes wrong

    def _garbled(self, error: MalformedResponse, now: float) -> WatchStep:
        # A new watch brings the line again; a list does without it.
        relist = self._phase is not _Phase.WATCHING or self._failures >= _PATIENCE
        return self._back_off("garbled", str(error), now, relist=relist)

    def _refused(self, status: ApiStatus, retry_after: float | None, now: float) -> WatchStep:
        code = status.code
        if status.gone or status.too_large:
            return self._expired(status, now)
        if code in (400, 422):
            if (step := self._simpler(now)) is not None:
                return step
            # The version may be one that this server cannot read.
            self._floor = _NEWEST
        if code == 404 and self._path + 1 < len(self.resource.paths):
            self._path += 1
            return self._list(now)
        if code in (403, 404) and self.resource.optional:
            return self._absent(code, now)
        what = f"{code} {status.reason or ''}".strip() + (f": {quoted(status.message)}" if status.message else "")
        what += _KUBELET_HINT if code == 403 and _KUBELET in (status.message or "") else _HINTS.get(code, "")
        # A watch that was refused for a while may be asked for again.
        relist = self._phase is not _Phase.WATCHING or code in (400, 404, 422)
        after = retry_after if retry_after is not None else status.retry_after
        return self._back_off(str(code), f"the server answers {what}", now, after=after, relist=relist)

    def _expired(self, status: ApiStatus, now: float) -> WatchStep:
        """List again after a version that is too old or too new for the server."""
        if self._phase is _Phase.WATCHING and not status.too_large:
            self._floor = self._version
        else:
            self._floor = _NEWEST
            self._whole = self._whole or self._paging
        self._reset_backoff(now)
        if self._failures >= _PATIENCE:
            return self._back_off("expired", f"the server answers {quoted(status.message or 'Expired')}", now)
        self.counts.failures["expired"] += 1
        self._failures += 1
        return self._list(now)

    def _simpler(self, now: float) -> WatchStep | None:
        """Retry without parameters that older servers do not know, or return None if there are none."""
        if self._phase is _Phase.WATCHING:
            return None
        if self._phase is _Phase.STREAMING:
            self._streaming = False
        elif self._fields_known and self.resource.fields_if_known:
            self._fields_known = False
        else:
            return None
        return self._list(now)

    def _absent(self, code: int, now: float) -> WatchStep:
        """Process the absence of the list. Known objects stay, since an outage may look the same."""
        self._phase = _Phase.ABSENT
        self._path = 0
        self.synced = True
        self.trouble = (
            self._problem("the server does not let us see them" + _HINTS[403], "warning") if code == 403 else None
        )
        self.wake_at = now + self._times.relist * (0.9 + 0.2 * self._random())
        return WatchStep(over=True)

    def _ended(self, reason: str, now: float) -> WatchStep:
        if self._phase is not _Phase.WATCHING:
            return self._back_off("lost", reason or "the server ended its answer before it was complete", now)
        lived = now - self._start.at
        if not reason and lived >= self._times.steady:
            # Watches end in order every few minutes.
            self._reset_backoff(now)
            return self._watch(now)
        worked = lived >= _WORKED_SECONDS or (lived >= 0 and self.counts.events > self._start.events)
        return self._back_off("lost", reason or "the server ends each watch at once", now, relist=False, worked=worked)

    def _due(self, now: float) -> WatchStep:
        if self._phase is _Phase.BACKING_OFF:
            return self._list(now) if self._then_list or now >= self._relist_at else self._watch(now)
        if self._phase is _Phase.ABSENT or now >= self._relist_at:
            self._reset_backoff(now)
            return self._list(now)
        if self._phase is not _Phase.WATCHING or self._start.at == math.inf:
            return self._back_off(
                "silent", "the server does not answer", now, relist=self._phase is not _Phase.WATCHING
            )
        # A half-closed stream; or the server has gone back, and waits for the version that it is asked for.
        self.counts.failures["silent"] += 1
        self._has_bookmarks = False
        return self._probe(now)

    def _back_off(
        self, kind: str, what: str, now: float, *, after: float | None = None, relist: bool = True, worked: bool = False
    ) -> WatchStep:
        """Wait after a failure, then list or watch again.

        `worked` means that a watch ended that brought changes, or would have: they must not wait for long.
        """
        self.counts.failures[kind] += 1
        self._reset_backoff(now)
        if self._phase is _Phase.STREAMING and kind != "429":
            # Better a list than none, whatever is wrong with the stream (client-go does so, too).
            self._stream_failed = True
        self._failures = min(self._failures + 1, _MOST_WORKED) if worked else self._failures + 1
        delay = self._times.backoff.delay(self._failures, self._random())
        # One lost watch is not reported: all are lost when a server restarts.
        if (self._failures > 1 and not worked) or not self.synced:
            self.trouble = self.trouble or self._problem(what, "error")
        self._then_list = relist
        self._phase = _Phase.BACKING_OFF
        self.wake_at = now + max(delay, min(after or 0.0, self._times.retry_after) * (1 + 0.1 * self._random()))
        return WatchStep(over=True)

    def _reset_backoff(self, now: float) -> None:
        """Reset the backoff if the watch lasted long enough."""
        if self._phase is _Phase.WATCHING and now - self._start.at >= self._times.steady:
            self._failures = 0

    def _problem(self, what: str, severity: str) -> Problem:
        kept = "; what is known stays in force" if self.synced else ""
        return Problem(
            object=f"API server, {self.resource.paths[self._path]}",
            message=f"{what}{kept}",
            severity="warning" if severity == "warning" else "error",
        )


_Key: TypeAlias = NamespacedName | None
"""None if the object's identity cannot be read."""


class ListCache:
    """The content of one list, kept up to date by its watch."""

    def __init__(self, kind: str, decode: Callable[[msgspec.Raw], Decoded] | None = None) -> None:
        self._kind = kind
        self._decode_raw = decode
        self._objects: dict[NamespacedName, AnyObject] = {}
        self._problems: dict[_Key, tuple[Problem, ...]] = {}
        self._broken = 0

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def objects(self) -> Collection[AnyObject]:
        """Return all usable objects."""
        return self._objects.values()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return the present problems of objects: some, and of how many objects there are more."""
        listed = ProblemList(origin=f"API server, {self._kind}")
        for number, problems in enumerate(self._problems.values()):
            if listed.full:
                listed.count("error", len(self._problems) - number)
                break
            listed.extend(problems)
        return listed.problems

    @property
    def broken(self) -> int:
        """Return the number of objects that cannot be used."""
        return self._broken

    def put(self, raw: AnyWire | msgspec.Raw) -> Event | None:
        """Add or replace an object, given as a shape of `model.wire` or as JSON; return the event, if any."""
        decoded = self._decode(raw)
        key = self._key(decoded)
        self._set_problems(key, decoded.problems)
        new = decoded.object
        if key is None or new is None:
            return Delete(self._kind, key) if key is not None and self._objects.pop(key, None) is not None else None
        if self._objects.get(key) == new:
            return None
        self._objects[key] = new
        return Upsert(new)

    def drop(self, raw: AnyWire | msgspec.Raw) -> Event | None:
        """Remove an object, given its last state. Raises MalformedResponse if its identity cannot be read."""
        key = self._key(self._decode(raw))
        if key is None:
            raise MalformedResponse("a deleted object has no readable name")
        self._set_problems(key, ())
        return Delete(self._kind, key) if self._objects.pop(key, None) is not None else None

    def missing(self, fresh: ListCache) -> list[NamespacedName]:
        """Return the names of objects that another cache lacks."""
        return [key for key in self._objects if key not in fresh._objects and key not in fresh._problems]

    def replace(self, fresh: ListCache, *, keep_missing: bool = False) -> list[Event]:
        """Replace the whole content and return the differences as events. `keep_missing` keeps what the new one lacks."""
        gone = [key for key in self._objects if key not in fresh._objects]
        events: list[Event] = [] if keep_missing else [Delete(self._kind, key) for key in gone]
        before, self._objects = self._objects, {}
        if keep_missing:
            self._objects = {key: before[key] for key in gone}
        for key, new in fresh._objects.items():
            old = before.get(key)
            if old is not None and old == new:
                # Receivers hold the old object: keeping both would double the memory.
                self._objects[key] = old
            else:
                self._objects[key] = new
                events.append(Upsert(new))
        self._problems, self._broken = fresh._problems, fresh._broken
        return events

    def _set_problems(self, key: _Key, problems: tuple[Problem, ...]) -> None:
        before = self._problems.pop(key, ()) if self._problems else ()
        if problems:
            self._problems[key] = problems
        for found, change in ((before, -1), (problems, 1)):
            if any(each.severity == "error" for each in found):
                self._broken += change

    def _decode(self, raw: AnyWire | msgspec.Raw) -> Decoded:
        if isinstance(raw, msgspec.Raw):
            if self._decode_raw is not None:
                return self._decode_raw(raw)
            return decode_json(raw, kind=self._kind, served=True)
        return decode_shape(raw, self._kind)

    def _key(self, decoded: Decoded) -> _Key:
        return decoded.identity[1] if decoded.identity is not None and decoded.identity[0] == self._kind else None
