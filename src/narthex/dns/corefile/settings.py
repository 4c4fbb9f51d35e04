"""The settings of a Corefile: one type for each plugin, and `ServerBlock` for all of a server block.

Zones are absolute names in lower case with their trailing dot (`cluster.local.`, `.`). Times are in seconds. An option whose
list of zones is optional has the value None if it is absent, and `(".",)` if it has no arguments.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from narthex.model.selector import Requirement

Zones = tuple[str, ...]

DEFAULT_PORT = 53
DEFAULT_TLS_PORT = 853
DEFAULT_HTTPS_PORT = 443
MAX_TTL = 3600
"""Limit of the TTL of cluster records and cached responses (rows S1, S9)."""
CACHE_DENIAL_TTL = 1800
CACHE_MIN_TTL = 5
CACHE_CAPACITY = 9984
CACHE_SERVFAIL_TTL = 5.0
MAX_UPSTREAMS = 15


class CorefilePosition(msgspec.Struct, frozen=True):
    """A line of a Corefile or imported file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Upstream(msgspec.Struct, frozen=True):
    """A DNS server to forward queries to."""

    address: str
    port: int = DEFAULT_PORT
    transport: Literal["dns", "tls"] = "dns"

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{'tls://' if self.transport == 'tls' else ''}{host}:{self.port}"


class HttpEndpoint(msgspec.Struct, frozen=True):
    """Host and port of an HTTP endpoint. An empty host stands for all addresses."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class BindSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`bind`: addresses or interfaces to listen on. An interface stands for all its addresses."""

    to: tuple[str, ...]
    excluded: tuple[str, ...] = ()
    """Addresses or interfaces that are excluded from those of `to`."""


class ConsolidateRule(msgspec.Struct, frozen=True, kw_only=True):
    """`consolidate` of `errors`: messages that match are counted and summarized."""

    interval: float
    pattern: str
    """A valid regular expression."""
    level: Literal["debug", "info", "warning", "error"] = "error"


class ErrorsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`errors`: failed queries are logged."""

    consolidate: tuple[ConsolidateRule, ...] = ()


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`log`: each query is logged."""

    zones: Zones = (".",)
    format: str = "{common}"
    classes: tuple[Literal["success", "denial", "error", "all"], ...] = ("all",)
    min_duration: float | None = None
    """Responses that took at least this time are logged whatever their class."""


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`health`: `/health` returns OK while the process runs (row S15)."""

    listen: HttpEndpoint = HttpEndpoint("", 8080)
    lameduck: float = 0.0
    """Seconds for which queries are still answered after a signal to terminate."""


class ReadySettings(msgspec.Struct, frozen=True, kw_only=True):
    """`ready`: `/ready` returns OK once the objects of the cluster have been read."""

    listen: HttpEndpoint = HttpEndpoint("", 8181)
    monitor: Literal["until-ready", "continuously"] = "until-ready"


class PrometheusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`prometheus`: metrics at `/metrics` (row S16)."""

    listen: HttpEndpoint = HttpEndpoint("localhost", 9153)


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`kubernetes`: the zones of a cluster."""

    zones: Zones
    """Forward and reverse zones; by default those of the server block."""
    endpoint: str = ""
    """URL of the API server; empty: that of the kubeconfig, or of the cluster that the pod runs in."""
    kubeconfig: str = ""
    """Path of a file, whose current context is used."""
    namespaces: tuple[str, ...] = ()
    """Namespaces whose names exist; empty: all."""
    namespace_labels: tuple[Requirement, ...] = ()
    labels: tuple[Requirement, ...] = ()
    """Label selector of Services and EndpointSlices."""
    pods: Literal["disabled", "insecure", "verified"] = "disabled"
    endpoint_pod_names: bool = False
    ttl: int = 5
    endpoints: bool = True
    """False with `noendpoints`: EndpointSlices are not watched."""
    fallthrough: Zones | None = None
    """Zones in which the next plugin answers for names that do not exist."""
    ignore_empty_service: bool = False
    zonal: bool = False
    """Names `ZONE.pin._zone.SERVICE` of headless Services select the endpoints in a topology zone."""
    startup_timeout: float = 5.0
    """Time after which the server starts to answer without complete lists (row S12)."""


class K8sExternalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`k8s_external`: load balancer addresses and external IPs in other zones (row S20)."""

    zones: Zones
    apex: str = "dns"
    ttl: int = 5
    headless: bool = False
    fallthrough: Zones | None = None


class HostsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`hosts`: a hosts file, and lines of the Corefile."""

    path: str = "/etc/hosts"
    zones: Zones
    inline: tuple[str, ...] = ()
    """Lines in the format of the file."""
    ttl: int = 3600
    reverse: bool = True
    reload: float = 5.0
    """Seconds between two checks of the file; 0: it is read once."""
    fallthrough: Zones | None = None


class AutopathSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`autopath`: the server walks the search list of the pod (row S18)."""

    zones: Zones
    path: str = ""
    """resolv.conf with the search list of all clients; empty: `@kubernetes`, the list of the client's pod."""


class CacheBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one half of the cache."""

    capacity: int = CACHE_CAPACITY
    max_ttl: int
    min_ttl: int = CACHE_MIN_TTL


class PrefetchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`prefetch` of `cache`: popular responses are refreshed before they expire."""

    amount: int
    """Queries, at intervals below `window` seconds, that make a response popular."""
    window: float = 60.0
    percent: int = 10
    """Remaining lifetime, in percent, at which the response is refreshed."""


class ServeStaleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`serve_stale` of `cache`: expired responses are served with a TTL of 0 until they are refreshed (row S10)."""

    max_stale: float = 3600.0
    verify: bool = False
    """Whether a stale response is served before or after an attempt to refresh it."""


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`cache`: responses of upstreams are cached (row S9)."""

    zones: Zones
    success: CacheBounds = CacheBounds(max_ttl=MAX_TTL)
    denial: CacheBounds = CacheBounds(max_ttl=CACHE_DENIAL_TTL)
    prefetch: PrefetchSettings | None = None
    stale: ServeStaleSettings | None = None
    servfail: float = CACHE_SERVFAIL_TTL
    """Lifetime of a SERVFAIL response; 0: it is not cached."""
    no_success: Zones = ()
    no_denial: Zones = ()
    keep_ttl: bool = False


class UpstreamTlsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`tls` and `tls_servername` of `forward`: files, and the expected name in the certificate of upstreams."""

    certificate: str = ""
    key: str = ""
    authority: str = ""
    """Empty: the certificate authorities of the system."""
    server_name: str = ""


class HealthCheckSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`health_check` of `forward`: how an upstream is checked after a failure."""

    interval: float = 0.5
    recursion: bool = True
    domain: str = "."


class ForwardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`forward`: queries are forwarded to upstreams (row S7)."""

    zone: str
    to: tuple[Upstream | str, ...]
    """Upstreams in the order of the Corefile; a string is the path of a resolv.conf that names some."""
    excluded: Zones = ()
    """Zones below `zone` that are not forwarded here."""
    force_tcp: bool = False
    prefer_udp: bool = False
    expire: float = 10.0
    """Lifetime of idle connections to upstreams."""
    max_fails: int = 2
    """Consecutive failed checks after which an upstream is down; 0 disables health checks."""
    tls: UpstreamTlsSettings = UpstreamTlsSettings()
    policy: Literal["random", "round_robin", "sequential"] = "random"
    health_check: HealthCheckSettings = HealthCheckSettings()
    max_concurrent: int = 0
    """Limit of queries in flight, beyond which queries get REFUSED; 0: no limit."""
    next_on: tuple[int, ...] = ()
    """Response codes after which the next `forward` of the server block is tried."""
    failover_on: tuple[int, ...] = ()
    """Response codes after which the next upstream is tried."""
    fail_fast: bool = False
    """Answer SERVFAIL at once while all upstreams are down, instead of trying one of them."""


class ReloadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`reload`: the Corefile is read again after changes."""

    interval: float = 30.0
    jitter: float = 15.0
    """At most half the interval."""


class LoadBalanceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`loadbalance`: each response has another order of addresses (row S8)."""

    limit: int = 0
    """Limit of address records in an answer; 0: no limit."""


class RewriteMatch(msgspec.Struct, frozen=True, kw_only=True):
    """The names that a rule of `rewrite` concerns."""

    how: Literal["exact", "prefix", "suffix", "substring", "regex"] = "exact"
    text: str
    """Lower case with a trailing dot, except for a regular expression."""


class RewriteAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`answer name` or `answer value`: owner names of a response, or names in the data of its records, are replaced."""

    part: Literal["name", "value"]
    pattern: str
    replacement: str


class RewriteRule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule of `rewrite`."""

    field: Literal["name", "type", "class", "ttl", "rcode", "cname"]
    stop: bool = True
    """False with `continue`: the next rules apply as well."""
    match: RewriteMatch = RewriteMatch(text="")
    """For fields name, ttl, rcode, and cname (which matches the target)."""
    replacement: str = ""
    """For fields name and cname."""
    auto: bool = False
    """`answer auto`: names in the response are mapped back. Always True for exact names."""
    answers: tuple[RewriteAnswer, ...] = ()
    old: int = 0
    new: int = 0
    """Numbers of types, classes, or response codes; for field ttl the least and the greatest TTL."""


class TemplateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`template`: responses from the text of records."""

    zones: Zones
    qclass: int
    qtype: int
    patterns: tuple[str, ...] = (".*",)
    answers: tuple[str, ...] = ()
    additional: tuple[str, ...] = ()
    authorities: tuple[str, ...] = ()
    rcode: int = 0
    extended_error: int | None = None
    extended_text: str = ""
    fallthrough: Zones | None = None


class AclPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `acl`."""

    action: Literal["allow", "block", "filter", "drop"]
    types: tuple[int, ...] = ()
    """Empty: all types."""
    networks: tuple[str, ...] = ()
    """Empty: all clients."""


class AclSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`acl`: the first policy that matches decides."""

    zones: Zones
    policies: tuple[AclPolicy, ...]


class Dns64Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`dns64`: AAAA records that are made from A records (RFC 6147)."""

    prefix: str = "64:ff9b::/96"
    translate_all: bool = False
    allow_ipv4: bool = False


class HeaderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`header`: bits of the header that are set or cleared, in queries to the next plugins and in responses."""

    query_set: int = 0
    query_clear: int = 0
    response_set: int = 0
    response_clear: int = 0


class NsidSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`nsid`: the name of this server for clients that ask for it (RFC 5001)."""

    data: str = ""
    """Empty: the name of the host."""


class ChaosSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`chaos`: version, authors, and host name for queries of class CH."""

    version: str = "narthex"
    authors: tuple[str, ...] = ()


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`transfer`: clients that may transfer zones of the cluster."""

    zones: Zones
    to: tuple[str, ...]
    """Addresses, or `*` for all clients."""


class TlsServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`tls`: files of the certificate for servers over TLS and HTTPS."""

    certificate: str
    key: str
    authority: str = ""
    """File of the authorities of clients' certificates; empty: those of the system."""
    client_auth: Literal["nocert", "verify_if_given", "require_and_verify"] = "nocert"


class ServerBlock(msgspec.Struct, frozen=True, kw_only=True):
    """The zones of a server block on one port, and its plugins; None or empty if a plugin is absent.

    A server block with keys of several ports becomes one of these for each port. A query belongs to the server block of its
    port (and address, with `bind`) with the longest zone that contains its name.
    """

    zones: Zones
    port: int = DEFAULT_PORT
    where: CorefilePosition = CorefilePosition("Corefile", 1)
    """First line of the server block."""
    bind: BindSettings | None = None
    debug: bool = False
    errors: ErrorsSettings | None = None
    log: tuple[LogSettings, ...] = ()
    health: HealthSettings | None = None
    ready: ReadySettings | None = None
    prometheus: PrometheusSettings | None = None
    loadbalance: LoadBalanceSettings | None = None
    cache: CacheSettings | None = None
    autopath: AutopathSettings | None = None
    hosts: HostsSettings | None = None
    external: K8sExternalSettings | None = None
    kubernetes: KubernetesSettings | None = None
    loop: bool = False
    forwards: tuple[ForwardSettings, ...] = ()
    reload: ReloadSettings | None = None
    transport: Literal["dns", "tls", "https"] = "dns"
    tls: TlsServerSettings | None = None
    rewrite: tuple[RewriteRule, ...] = ()
    templates: tuple[TemplateSettings, ...] = ()
    acl: tuple[AclSettings, ...] = ()
    dns64: Dns64Settings | None = None
    header: HeaderSettings | None = None
    nsid: NsidSettings | None = None
    chaos: ChaosSettings | None = None
    transfer: tuple[TransferSettings, ...] = ()
    bufsize: int | None = None
    """Limit of the UDP size that a client advertises."""
    minimal: bool = False
    refuses_any: bool = False
    """Plugin `any`: queries of type ANY get a HINFO record (RFC 8482)."""
    whoami: bool = False
