"""One soak: the modes side by side, each on a node of its own, for a bounded time."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from tests.soak import harm
from tests.soak.gates import Findings, Sample
from tests.soak.world import CHURN_SECONDS, ROLLOUT_SECONDS, Churn, SoakCluster, SoakEnded, SoakLoad, SoakRollouts

from narthex.linux.nfnetlink import FAMILY_NUMBERS, NfNetlink
from narthex.model.net import FAMILIES
from narthex.netfilter.netlink import conntrack

KILLS_SHARE = 1 / 3
"""Part of the time in which the proxy is killed. Afterwards one process lives to the end, so that growth can be seen."""
MOST_SAMPLES = 400
SETTLE_TRIES, SETTLE_SECONDS = 15, 2.0
"""The last change may still be on its way."""


class SoakSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done."""

    modes: tuple[str, ...]
    seconds: float
    seed: int = 1
    pause: float = 5.0
    """Seconds between two faults."""
    flood: int = 4000
    """Packets of a flood."""
    silent: int = 300
    """Silent connections to each health port."""


class ModeSoak:
    """The soak of one mode."""

    def __init__(self, mode: str, settings: SoakSettings, ended: threading.Event) -> None:
        self.found = Findings(mode=mode)
        self._settings = settings
        self._ended = ended
        self._random = random.Random(settings.seed)
        self._runs = 0

    def run(self) -> None:
        """Run to the end, or until somebody ends it. What is left over is removed in any case."""
        with (
            suppress(SoakEnded),
            tempfile.TemporaryDirectory(prefix="narthex-soak-") as directory,
            SoakCluster(Path(directory), self.found.mode, self._ended) as cluster,
        ):
            self._run(cluster)

    def _run(self, cluster: SoakCluster) -> None:
        load = SoakLoad(cluster)
        rollouts, churn = SoakRollouts(cluster, load), Churn(cluster, self._settings.seed)
        cluster.run_proxy()
        begin = time.monotonic()
        with load.running(), self._counting(load):
            with (
                self._beside(churn.change, CHURN_SECONDS),
                self._beside(rollouts.replace, ROLLOUT_SECONDS),
                self._sampling(cluster, begin),
            ):
                self._harm(cluster, load, begin)
                cluster.halted.set()
            cluster.halted.clear()
            self._check_end(cluster, churn)

    def _harm(self, cluster: SoakCluster, load: SoakLoad, begin: float) -> None:
        """Do every kind of harm, at least once, in an order of chance; kills only in the first part."""
        settings, found = self._settings, self.found
        flushes = harm.FLUSHES[found.mode]
        calm: list[Callable[[], None]] = [
            lambda: harm.udp_flood(cluster, found, settings.flood),
            lambda: harm.syn_flood(cluster, found, settings.flood),
            lambda: harm.silent_flood(cluster, found, settings.silent),
            lambda: self._flush_twice(cluster, load, self._random.choice(flushes)),
        ]
        kills: list[Callable[[], None]] = [lambda: self._kill(cluster)] * 2
        seconds, kinds = 0.0, [*calm, *kills]
        while seconds < settings.seconds:
            for act in self._random.sample(kinds, len(kinds)):
                self._alive(cluster)
                act()
                if self._ended.wait(settings.pause):
                    raise SoakEnded
            seconds = time.monotonic() - begin
            if seconds > settings.seconds * KILLS_SHARE:
                kinds = calm

    def _flush_twice(self, cluster: SoakCluster, load: SoakLoad, command: tuple[str, ...]) -> None:
        """Flush, and flush again as soon as everything works: the second outage is no longer than the first."""
        for _ in range(2):
            harm.flush(cluster, load, self.found, command)

    def _kill(self, cluster: SoakCluster) -> None:
        self._runs += 1
        harm.kill(cluster, self.found)

    def _alive(self, cluster: SoakCluster) -> None:
        if cluster.process.poll() is not None:
            raise RuntimeError(f"the proxy ended with status {cluster.process.returncode}:\n{cluster.log[-4000:]}")

    def _check_end(self, cluster: SoakCluster, churn: Churn) -> None:
        """Compare the rules with the objects after the last change, as `narthex check` does."""
        cluster.wait(churn.settled, "the end of deleted Services")
        self._alive(cluster)
        for _ in range(SETTLE_TRIES):
            self.found.differences = cluster.differences()
            if not self.found.differences or self._ended.wait(SETTLE_SECONDS):
                break

    # ---- what goes on beside the harm ------------------------------------------------------------------------------

    @contextmanager
    def _beside(self, act: Callable[[], None], pause: float) -> Iterator[None]:
        """Repeat something in a thread until the block ends. Its error ends the soak."""
        done = threading.Event()

        def repeat() -> None:
            try:
                while not done.wait(pause):
                    act()
            except SoakEnded:
                pass
            except BaseException as error:
                self.found.errors.append(f"{type(error).__name__}: {error}")
                self._ended.set()

        thread = threading.Thread(target=repeat, name=f"soak-{self.found.mode}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    @contextmanager
    def _sampling(self, cluster: SoakCluster, begin: float) -> Iterator[None]:
        pause = max(0.1, min(5.0, self._settings.seconds / MOST_SAMPLES))
        netlink = NfNetlink(cluster.world.node)

        def sample() -> None:
            process, run = cluster.process, self._runs
            if process is None:
                return
            # It may be about to end.
            with suppress(OSError, KeyError):
                taken = _sample(process.pid, netlink, time.monotonic() - begin, run)
                if cluster.process is process:
                    self.found.samples.append(taken)

        with self._beside(sample, pause):
            yield

    @contextmanager
    def _counting(self, load: SoakLoad) -> Iterator[None]:
        """Keep the figures of the load up to date."""

        def count() -> None:
            self.found.connections = sum(each.made for each in load.all)
            self.found.held = len(load.main.held)
            self.found.failures = [failure for each in load.all for failure in list(each.failures)]

        try:
            with self._beside(count, 1.0):
                yield
        finally:
            count()

    def progress(self, seconds: float) -> str:
        """One line on what happened so far."""
        found = self.found
        acts = ", ".join(f"{number} {name}" for name, number in sorted(found.actions.items()))
        last = found.samples[-1] if found.samples else None
        state = (
            f"{last.memory:.1f} MiB, {last.files} files, {last.threads} threads, {last.conntrack} entries"
            if last
            else ""
        )
        failed = f"{len(found.failed())} failed, {len(found.failures)} with those after flushes"
        return f"{seconds / 60:5.1f} min {found.mode:9} {found.connections} connections ({failed}); {acts}; {state}"


def _sample(pid: int, netlink: NfNetlink, at: float, run: int) -> Sample:
    root = Path("/proc", str(pid))
    status = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
    entries = sum(
        1
        for family in FAMILIES
        for _ in netlink.entries(conntrack.SUBSYSTEM, conntrack.GET, FAMILY_NUMBERS[family.value])
    )
    return Sample(
        at=at,
        run=run,
        memory=int(status["VmRSS"].split()[0]) / 1024,
        files=sum(1 for _ in (root / "fd").iterdir()),
        threads=int(status["Threads"]),
        conntrack=entries,
    )


def soak(settings: SoakSettings, ended: threading.Event, tell: Callable[[str], object] = print) -> list[Findings]:
    """Run the modes side by side, with one line of progress a minute for each. `ended` ends it early."""
    begin = time.monotonic()
    soaks = [ModeSoak(mode, settings, ended) for mode in settings.modes]

    def guarded(each: ModeSoak) -> None:
        try:
            each.run()
        except BaseException as error:
            each.found.errors.append(f"{type(error).__name__}: {error}")
            ended.set()

    with ThreadPoolExecutor(len(soaks)) as pool:
        futures = [pool.submit(guarded, each) for each in soaks]
        minute = 0
        while not all(future.done() for future in futures):
            time.sleep(0.2)
            if time.monotonic() - begin > 60 * (minute + 1):
                minute += 1
                for each in soaks:
                    tell(each.progress(60.0 * minute))
    return [each.found for each in soaks]
