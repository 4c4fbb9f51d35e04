"""Faults in force in a running lab: begun on request, ended by time or request, kept true by rules and queues.

What is in force is decided anew at each turn, so a pod that is gone takes its faults along.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from narthex.lab.faults import (
    BadFault,
    Fault,
    Kind,
    Place,
    checked,
    delays,
    in_force,
    next_end,
    no_rules,
    rules,
)
from narthex.lab.program.state import LabError
from narthex.linux import namespaces as netns
from narthex.linux.libnftables import NftError, run_nft
from narthex.linux.run import CommandError, run

Told = Callable[[Fault, bool], object]
"""Is told of each fault that begins (True) or ends."""


_LOOK_SECONDS = 1.0
"""While there are faults: a pod that has gone takes its faults along."""
_ERROR_PAUSE_SECONDS = 1.0


class Faults:
    """What goes wrong at present. For any thread; one runs `run`."""

    def __init__(
        self,
        places: Callable[[], Mapping[str, Place]],
        api: Callable[[bool], object],
        told: Told,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`places`: of all nodes and pods now; `api` takes the API server's listeners down (False) and up."""
        self.present: tuple[Fault, ...] = ()
        self._lock = threading.RLock()
        self._news = threading.Event()
        self._places = places
        self._api = api
        self._told = told
        self._wall = wall
        self._numbers = 0
        self._api_up = True
        self._rules: dict[str, str] = {}
        """In force, by network namespace."""
        self._delays: dict[tuple[str, str], int] = {}

    def begin(self, wish: Mapping[str, Any]) -> Fault:
        """A fault from now on: `kind`, `targets`, and `percent`, `milliseconds`, `seconds` where it has them. Raises LabError
        when it cannot be; then nothing has changed."""
        with self._lock:
            try:
                fault = checked(self._wished(wish), self._places())
            except BadFault as error:
                raise LabError(str(error)) from None
            before = self.present
            self.present = (*before, fault)
            try:
                self._apply()
            except LabError:
                self.present = before
                self._apply()
                raise
            self._numbers += 1
        self._told(fault, True)
        self._news.set()
        return fault

    def end(self, number: int | None) -> tuple[Fault, ...]:
        """End one fault, or all; those that ended. Raises LabError when there is none of that number."""
        with self._lock:
            ended = tuple(fault for fault in self.present if number in (None, fault.number))
            if number is not None and not ended:
                raise LabError(f"there is no fault {number}; `narthex lab fault list` shows which there are")
            self._keep(tuple(fault for fault in self.present if fault not in ended))
        return ended

    def turn(self) -> None:
        """End what is due. Raises LabError when the kernel does not let go."""
        with self._lock:
            self._keep(in_force(self.present, self._places(), self._wall()))

    def run(self) -> None:
        """End what is due, for good."""
        while True:
            self._news.wait(self._next_look())
            self._news.clear()
            try:
                self.turn()
            except LabError as error:
                print(f"faults: {error}", file=sys.stderr, flush=True)
                time.sleep(_ERROR_PAUSE_SECONDS)

    def _next_look(self) -> float | None:
        """Seconds; None: nothing ends before something begins."""
        present = self.present
        if not present:
            return None
        end = next_end(present)
        return _LOOK_SECONDS if end is None else min(_LOOK_SECONDS, max(0.0, end - self._wall()))

    def _wished(self, wish: Mapping[str, Any]) -> Fault:
        now, seconds = self._wall(), wish.get("seconds")
        return Fault(
            number=self._numbers + 1,
            kind=Kind(wish["kind"]),
            targets=tuple(self.named(target) for target in wish.get("targets", ())),
            percent=int(wish.get("percent", 0)),
            milliseconds=int(wish.get("milliseconds", 0)),
            since=now,
            until=None if seconds is None else now + float(seconds),
        )

    def _keep(self, left: tuple[Fault, ...]) -> None:
        if left == self.present:
            return
        numbers = {fault.number for fault in left}
        gone = [fault for fault in self.present if fault.number not in numbers]
        self.present = left
        self._apply()
        for fault in gone:
            self._told(fault, False)

    def named(self, target: str) -> str:
        """A pod's name alone means the one in the namespace `default`, as with kubectl, or the only one of that name. Raises
        BadFault when it could be several."""
        places = self._places()
        if target in places or "/" in target:
            return target
        found = [name for name in places if name.partition("/")[2] == target]
        if f"default/{target}" in found:
            return f"default/{target}"
        if len(found) > 1:
            raise BadFault(f"{target!r} could be {', '.join(sorted(found))}: name it in full")
        return found[0] if found else target

    def _apply(self) -> None:
        """Make the network as the present faults want it."""
        places = self._places()
        bridges = {place.namespace for place in places.values() if place.node}
        wanted = rules(self.present, places)
        for namespace in [each for each in self._rules if each not in wanted]:
            # A bridge's namespace is never a pod's.
            self._nft(namespace, no_rules(namespace in bridges))
            del self._rules[namespace]
        for namespace, text in wanted.items():
            if self._rules.get(namespace) != text:
                self._nft(namespace, text)
                self._rules[namespace] = text
        self._queues(delays(self.present, places))
        up = not any(fault.kind is Kind.API for fault in self.present)
        if up is not self._api_up:
            self._api(up)
            self._api_up = up

    def _nft(self, namespace: str, text: str) -> None:
        if not netns.exists(namespace):
            return
        try:
            run_nft(text, namespace)
        except (NftError, OSError) as error:
            raise LabError(f"the kernel does not take the rules of a fault: {error}") from error

    def _queues(self, wanted: Mapping[tuple[str, str], int]) -> None:
        for namespace, device in [each for each in self._delays if each not in wanted]:
            if netns.exists(namespace):
                self._tc(namespace, "del", device)
            del self._delays[namespace, device]
        for (namespace, device), milliseconds in wanted.items():
            if self._delays.get((namespace, device)) != milliseconds:
                self._tc(namespace, "replace", device, "netem", "delay", f"{milliseconds}ms")
                self._delays[namespace, device] = milliseconds

    def _tc(self, namespace: str, word: str, device: str, *queue: str) -> None:
        try:
            run(["tc", "qdisc", word, "dev", device, "root", *queue], namespace=namespace)
        except FileNotFoundError:
            raise LabError("the program 'tc' is missing; install the package iproute2") from None
        except CommandError as error:
            if "qdisc kind is unknown" in error.said:
                raise LabError(
                    "this kernel has no netem (module sch_netem), so it cannot delay packets; loss and partition need none"
                ) from None
            raise LabError(str(error)) from error
