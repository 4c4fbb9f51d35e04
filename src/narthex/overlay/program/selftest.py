"""The self-test of transmit checksums, in a thread of its own: it waits for answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from narthex.linux.background import beside
from narthex.linux.clock import Clock, SystemClock
from narthex.overlay.kernel import checksums
from narthex.overlay.kernel.checksums import ChecksumVerdict
from narthex.overlay.program.metrics import OverlayMetrics
from narthex.runtime.logs import LOGGER

FIRST, UNCLEAR, CLEAR = 1.0, 30.0, 600.0
"""Seconds until a device is tested: after a peer was first seen, again without a verdict, again with one."""
_MOST_PEERS = 3
"""Asked in one test: the first that says anything decides."""

Tunnels = tuple[tuple[str, str, tuple[str, ...]], ...]
_PATIENCE = 5.0
"""Seconds that a test which is under way has to end in."""


class SelfTest:
    """Tests each vxlan device now and then, and switches the offload off where it is broken."""

    def __init__(
        self, tunnels: Callable[[], Tunnels], figures: OverlayMetrics, repair: bool, clock: Clock | None = None
    ) -> None:
        """`tunnels` gives devices, the own address on each, and its peers' addresses; asked from another thread."""
        self._tunnels = tunnels
        self._figures = figures
        self._repair = repair
        self._clock = clock or SystemClock()
        self._stopping = False
        self._refused = False

    def running(self) -> AbstractContextManager[None]:
        """Inside, devices are tested."""
        return beside("overlay-selftest", self._run, self._stop, patience=_PATIENCE)

    def _stop(self) -> None:
        self._stopping = True
        self._clock.wake()

    def _run(self) -> None:
        rest = FIRST
        while not self._stopping:
            self._clock.sleep(rest)
            if self._stopping:
                return
            verdicts = [self.test(*tunnel) for tunnel in self._tunnels() if tunnel[2]]
            if not verdicts:
                rest = FIRST
            else:
                rest = UNCLEAR if ChecksumVerdict.UNCLEAR in verdicts else CLEAR

    def test(self, device: str, own: str, peers: tuple[str, ...]) -> ChecksumVerdict:
        """Test one device, and repair it."""
        found = ChecksumVerdict.UNCLEAR
        try:
            for peer in peers[:_MOST_PEERS]:
                found = checksums.test(device, own, peer, self._is_stopping)
                if found is not ChecksumVerdict.UNCLEAR:
                    break
            if found is ChecksumVerdict.BROKEN and checksums.offloaded(device):
                found = self._broken(device, own, peer)
        except PermissionError as error:
            if not self._refused:
                LOGGER.warning(
                    "overlay: the self-test of checksums cannot be made: %s; it needs CAP_NET_RAW", error.strerror
                )
            self._refused = True
        except OSError as error:
            # The device may be gone just now; the loop sees to that.
            LOGGER.debug("the self-test of %s: %s", device, error)
        self._figures.checksums[device] = found
        return found

    def _is_stopping(self) -> bool:
        return self._stopping

    def _broken(self, device: str, own: str, peer: str) -> ChecksumVerdict:
        said = f"overlay: packets that leave {device} for {peer} have wrong checksums, which their receivers drop"
        if not self._repair:
            LOGGER.error("%s: run `ethtool -K %s tx-checksum-ip-generic off`", said, device)
            return ChecksumVerdict.BROKEN
        checksums.switch_off(device)
        self._figures.repaired += 1
        found = checksums.test(device, own, peer, self._is_stopping)
        LOGGER.warning(
            "%s: the kernel now completes them itself (offload of %s is off), and the test says: %s",
            said,
            device,
            found.value,
        )
        return found
