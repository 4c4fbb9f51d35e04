"""What a Corefile says, typed. `corefile.py` reads it from text; everything that serves is built from these values.

Zones are absolute names in lower case with their dot at the end (`cluster.local.`, `.`). Times are seconds. Where an
option takes "a list of zones, or none for all", the value is None when the option is absent and `(".",)` when it
stands alone.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from narthex.model.selector import Requirement

Zones = tuple[str, ...]

DEFAULT_PORT = 53
DEFAULT_TLS_PORT = 853
LONGEST_TTL = 3600
"""The most a record of the cluster's zone may live, and an answer in the cache (rows S1, S9)."""
CACHE_DENIAL_TTL = 1800
CACHE_LEAST_TTL = 5
CACHE_CAPACITY = 9984
CACHE_SERVFAIL_TTL = 5.0
MOST_UPSTREAMS = 15


class Position(msgspec.Struct, frozen=True):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Upstream(msgspec.Struct, frozen=True):
    """A server to forward to."""

    address: str
    port: int = DEFAULT_PORT
    transport: Literal["dns", "tls"] = "dns"

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{'tls://' if self.transport == 'tls' else ''}{host}:{self.port}"


class Listen(msgspec.Struct, frozen=True):
    """Where an HTTP endpoint listens. An empty host stands for all addresses."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Bind(msgspec.Struct, frozen=True, kw_only=True):
    """`bind`: addresses or links to listen on. A link stands for all its addresses."""

    to: tuple[str, ...]
    excluded: tuple[str, ...] = ()
    """Addresses or links that `to` does not mean, although a link of it has them."""


class Consolidate(msgspec.Struct, frozen=True, kw_only=True):
    """`errors`: equal messages are counted and printed once in a while."""

    every: float
    pattern: str
    """A regular expression; it compiles."""
    level: Literal["debug", "info", "warning", "error"] = "error"


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """`errors`: failures of single questions go to the log."""

    consolidate: tuple[Consolidate, ...] = ()


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """`log`: one line for each question."""

    zones: Zones = (".",)
    format: str = "{common}"
    classes: tuple[Literal["success", "denial", "error", "all"], ...] = ("all",)
    slower_than: float | None = None
    """Answers that took longer are logged whatever their class."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """`health`: `/health` says OK while the process lives (row S15)."""

    listen: Listen = Listen("", 8080)
    lameduck: float = 0.0
    """Seconds between a signal to end and the end, during which questions are still answered."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """`ready`: `/ready` says OK once all has been read that answers need."""

    listen: Listen = Listen("", 8181)
    monitor: Literal["until-ready", "continuously"] = "until-ready"


class Prometheus(msgspec.Struct, frozen=True, kw_only=True):
    """`prometheus`: `/metrics` (row S16)."""

    listen: Listen = Listen("localhost", 9153)


class Kubernetes(msgspec.Struct, frozen=True, kw_only=True):
    """`kubernetes`: the cluster's zones."""

    zones: Zones
    """Forward and reverse ones, never empty: the server block's when the plugin names none."""
    endpoint: str = ""
    """URL of the API server; empty: that of the kubeconfig, or the cluster's own."""
    kubeconfig: str = ""
    """A file; its current context counts."""
    namespaces: tuple[str, ...] = ()
    """Only these are shown; empty: all."""
    namespace_labels: tuple[Requirement, ...] = ()
    labels: tuple[Requirement, ...] = ()
    """What a Service's and its EndpointSlices' labels must meet."""
    pods: Literal["disabled", "insecure", "verified"] = "disabled"
    endpoint_pod_names: bool = False
    ttl: int = 5
    endpoints: bool = True
    """False by `noendpoints`: EndpointSlices are not watched at all."""
    fallthrough: Zones | None = None
    """For names of these zones that do not exist, what comes after is asked."""
    ignore_empty_service: bool = False
    startup_timeout: float = 5.0
    """Questions wait so long for the first sync before they are answered without it (row S12)."""


class External(msgspec.Struct, frozen=True, kw_only=True):
    """`k8s_external`: addresses of load balancers and external IPs in another zone (row S20)."""

    zones: Zones
    apex: str = "dns"
    ttl: int = 5
    headless: bool = False
    fallthrough: Zones | None = None


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """`hosts`: a hosts file, and lines of the Corefile itself."""

    path: str = "/etc/hosts"
    zones: Zones
    inline: tuple[str, ...] = ()
    """Lines as in the file."""
    ttl: int = 3600
    reverse: bool = True
    """False by `no_reverse`."""
    reload: float = 5.0
    """Seconds between two looks at the file; 0: never again."""
    fallthrough: Zones | None = None


class Autopath(msgspec.Struct, frozen=True, kw_only=True):
    """`autopath`: the search list is walked here instead of in the pod (row S18)."""

    zones: Zones
    path: str = ""
    """A file as /etc/resolv.conf whose search list holds for every client; empty: `@kubernetes`, the list that the
    client's own pod has."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One half of the cache."""

    capacity: int = CACHE_CAPACITY
    longest: int
    """Seconds that an answer is kept at most."""
    least: int = CACHE_LEAST_TTL


class Prefetch(msgspec.Struct, frozen=True, kw_only=True):
    """Popular answers are asked for again before they are over."""

    amount: int
    """Questions that make a name popular; with no gap of `window` seconds between two."""
    window: float = 60.0
    percent: int = 10
    """Of the lifetime that is left when it is asked again."""


class Stale(msgspec.Struct, frozen=True, kw_only=True):
    """`serve_stale`: answers that are over are given with a TTL of 0 while there is no newer one (row S10)."""

    longest: float = 3600.0
    mode: Literal["immediate", "verified"] = "immediate"
    """Whether the stale answer goes out before or after the source has been asked."""


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """`cache` (row S9)."""

    zones: Zones
    success: Kept = Kept(longest=LONGEST_TTL)
    denial: Kept = Kept(longest=CACHE_DENIAL_TTL)
    prefetch: Prefetch | None = None
    stale: Stale | None = None
    servfail: float = CACHE_SERVFAIL_TTL
    """Seconds that a SERVFAIL is kept; 0: not at all."""
    no_success: Zones = ()
    """Zones below which no positive answer is kept, by `disable success`."""
    no_denial: Zones = ()
    keep_ttl: bool = False
    """Answers out of the cache keep the TTL they came with."""


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """`tls` and `tls_servername` of `forward`: files and the name that the servers' certificates must bear."""

    certificate: str = ""
    key: str = ""
    authority: str = ""
    """Empty: the system's authorities."""
    server_name: str = ""


class HealthCheck(msgspec.Struct, frozen=True, kw_only=True):
    """How an upstream that has failed is tried again."""

    every: float = 0.5
    recursion: bool = True
    domain: str = "."


class Forward(msgspec.Struct, frozen=True, kw_only=True):
    """`forward` (row S7)."""

    zone: str
    to: tuple[Upstream | str, ...]
    """In the order written; a string is the path of a file as /etc/resolv.conf, whose name servers stand there."""
    excluded: Zones = ()
    """Of the names below `zone`, what is below these is not forwarded here."""
    force_tcp: bool = False
    prefer_udp: bool = False
    expire: float = 10.0
    """Seconds after which an idle connection to an upstream is closed."""
    max_fails: int = 2
    """Failed checks after which an upstream is down; 0: it never is, and is never checked."""
    tls: Tls = Tls()
    policy: Literal["random", "round_robin", "sequential"] = "random"
    health_check: HealthCheck = HealthCheck()
    max_concurrent: int = 0
    """Questions on their way at one time; beyond them REFUSED. 0: no limit."""
    next_on: tuple[int, ...] = ()
    """Response codes after which the next `forward` of the server block is asked."""
    failover_on: tuple[int, ...] = ()
    """Response codes after which the next upstream is asked."""
    fail_fast: bool = False
    """SERVFAIL at once while all upstreams are down, instead of trying one of them."""


class Reload(msgspec.Struct, frozen=True, kw_only=True):
    """`reload`: the Corefile is read again when it has changed."""

    interval: float = 30.0
    jitter: float = 15.0
    """At most half the interval."""


class LoadBalance(msgspec.Struct, frozen=True, kw_only=True):
    """`loadbalance`: the order of addresses is drawn for every answer (row S8)."""

    limit: int = 0
    """Records of an answer at most; 0: all."""


class ServerBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A server: which zones it answers on which port, and how. None and empty: the plugin is not there.

    A block with keys of several ports becomes several of these, equal but for zones and port. A question belongs to
    the block of its port (and address, with `bind`) with the longest zone that it is in.
    """

    zones: Zones
    port: int = DEFAULT_PORT
    where: Position = Position("Corefile", 1)
    """Where the block begins."""
    bind: Bind | None = None
    debug: bool = False
    errors: Errors | None = None
    log: tuple[Log, ...] = ()
    health: Health | None = None
    ready: Ready | None = None
    prometheus: Prometheus | None = None
    loadbalance: LoadBalance | None = None
    cache: Cache | None = None
    autopath: Autopath | None = None
    hosts: Hosts | None = None
    external: External | None = None
    kubernetes: Kubernetes | None = None
    loop: bool = False
    forwards: tuple[Forward, ...] = ()
    reload: Reload | None = None
