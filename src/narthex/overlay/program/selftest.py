"""The self-test of transmit checksums, in its own thread: it waits for replies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from narthex.linux.background import in_background
from narthex.linux.clock import Clock, SystemClock
from narthex.overlay.kernel import checksums
from narthex.overlay.kernel.checksums import ChecksumVerdict
from narthex.overlay.program.metrics import OverlayMetrics
from narthex.runtime.logs import LOGGER

FIRST, UNCLEAR, CLEAR = 1.0, 30.0, 600.0
"""Seconds until a device is tested: after a peer was first seen, after an unclear result, after a clear one."""
_MOST_PEERS = 3
"""Peers per test; the first clear result counts."""

Tunnels = tuple[tuple[str, str, tuple[str, ...]], ...]
_STOP_SECONDS = 5.0
"""Time for a running test during shutdown."""


class SelfTest:
    """Tests each VXLAN device periodically, and disables a broken offload."""

    def __init__(
        self, tunnels: Callable[[], Tunnels], metrics: OverlayMetrics, repair: bool, clock: Clock | None = None
    ) -> None:
        """Set the devices to test: `tunnels` returns device, own address, and peer addresses. Called from another thread."""
        self._tunnels = tunnels
        self._metrics = metrics
        self._repair = repair
        self._clock = clock or SystemClock()
        self._stopping = False
        self._refused = False

    def running(self) -> AbstractContextManager[None]:
        """Return a context manager that runs the tests."""
        return in_background("overlay-selftest", self._run, self._stop, patience=_STOP_SECONDS)

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
                LOGGER.warning("overlay: the checksum self-test cannot run: %s; it needs CAP_NET_RAW", error.strerror)
            self._refused = True
        except OSError as error:
            # The device may have been deleted; the loop restores it.
            LOGGER.debug("the self-test of %s: %s", device, error)
        self._metrics.checksums[device] = found
        return found

    def _is_stopping(self) -> bool:
        return self._stopping

    def _broken(self, device: str, own: str, peer: str) -> ChecksumVerdict:
        said = f"overlay: packets that leave {device} for {peer} have wrong checksums, which their receivers drop"
        if not self._repair:
            LOGGER.error("%s: run `ethtool -K %s tx-checksum-ip-generic off`", said, device)
            return ChecksumVerdict.BROKEN
        checksums.switch_off(device)
        self._metrics.repaired += 1
        found = checksums.test(device, own, peer, self._is_stopping)
        LOGGER.warning(
            "%s: the kernel now completes them itself (offload of %s is disabled); new test result: %s",
            said,
            device,
            found.value,
        )
        return found
