"""Manifest files, a clock that advances only by hand, and events in short."""

from collections.abc import Iterable

from narthex.kube import manifests
from narthex.kube.manifests import ManifestSource
from narthex.model.store import Delete, Event, Upsert


def service(name: str, port: int | str = 80) -> str:
    return f"apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{ports: [{{port: {port}}}]}}\n"


def told(events: Iterable[Event]) -> list[str]:
    """Events in short: `+web`, `-web`, `synced`."""
    return [_short(event) for event in events]


def _short(event: Event) -> str:
    match event:
        case Upsert():
            return f"+{event.object.key.name}"
        case Delete():
            return f"-{event.key.name}"
    return "synced"


class FakeClock:
    """A clock that advances only by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def settled(source: ManifestSource, clock: FakeClock) -> list[Event]:
    """Scan until losses take effect; return all events."""
    events = source.scan()
    clock.now += manifests.SETTLE_SECONDS
    return events + source.scan()


FIFTY = [service(f"s{number}") for number in range(50)]
