"""The values of a valid KubeProxyConfiguration, with kube-proxy's defaults (behaviours of group 27).

Times are in seconds.
"""

from __future__ import annotations

import msgspec

DEFAULT_MODE = "nftables"
HEALTHZ_PORT = 10256
METRICS_PORT = 10249
IPVS_GATE, LOCALHOST_GATE = "KubeProxyIPVS", "KubeProxyNFTablesLocalhostNodePorts"
FEATURE_GATES = {"AllowServiceExternalIPs": True, IPVS_GATE: True, LOCALHOST_GATE: False}
"""Feature gates with an effect here, with their defaults in Kubernetes 1.37."""


class ModeConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`iptables` or `nftables`."""

    masquerade_bit: int = 14
    masquerade_all: bool = False
    localhost_node_ports: bool = True
    """iptables only."""
    sync_period: float = 30.0
    min_sync_period: float = 0.0
    """kube-proxy's default is one second. Here a change takes effect at once, and changes during a sync are combined
    anyway.
    """


class IpvsConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`ipvs`."""

    sync_period: float = 30.0
    min_sync_period: float = 0.0
    scheduler: str = ""
    exclude_cidrs: tuple[str, ...] = ()
    strict_arp: bool = False
    tcp_timeout: float = 0.0
    """0 leaves the timeout unchanged, as in the next two fields."""
    tcp_fin_timeout: float = 0.0
    udp_timeout: float = 0.0


class ConntrackConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`conntrack`."""

    max_per_core: int = 32768
    """0 leaves the limit unchanged."""
    min: int = 131072
    tcp_established_timeout: float = 86400.0
    tcp_close_wait_timeout: float = 3600.0
    tcp_be_liberal: bool = False
    udp_timeout: float = 0.0
    udp_stream_timeout: float = 0.0


class ClientConnection(msgspec.Struct, frozen=True, kw_only=True):
    """`clientConnection`."""

    kubeconfig: str = ""
    """Path; empty selects the service account of the pod."""
    accept_content_types: str = ""
    content_type: str = "application/vnd.kubernetes.protobuf"
    qps: float = 5.0
    burst: int = 10


class LoggingConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`logging`."""

    format: str = "text"
    verbosity: int = 0
    vmodule: tuple[tuple[str, int], ...] = ()
    flush_frequency: float = 5.0


class WinkernelConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`winkernel`; Windows only, read and unused."""

    network_name: str = ""
    source_vip: str = ""
    enable_dsr: bool = False
    root_hns_endpoint_name: str = ""
    forward_health_check_vip: bool = False


class NodeParts(msgspec.Struct, frozen=True, kw_only=True):
    """`parts` of a NarthexConfiguration: the parts that `narthex node` runs."""

    proxy: bool = True
    cni: bool = False
    overlay: bool = False
    dns: bool = False
    announcer: bool = False


class CniConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`cni` of a NarthexConfiguration: the agent of the CNI plugins."""

    socket: str = "/run/narthex/cni.sock"
    """Path of the agent's socket (`narthex cni install --socket`)."""
    state_directory: str = "/var/lib/cni/narthex"
    """Directory of the records that agent and plugins share (`--state-dir`)."""


class OverlayConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`overlay` of a NarthexConfiguration: the routes between the pods of different nodes."""

    net_conf: str = "/etc/kube-flannel/net-conf.json"
    """flannel's configuration file."""
    subnet_file: str = "/run/flannel/subnet.env"
    """Written for the CNI plugin `flannel`."""
    interfaces: tuple[str, ...] = ()
    """Names or addresses of links to the other nodes; the first existing one is used."""
    interface_patterns: tuple[str, ...] = ()
    """The same as regular expressions."""
    interface_can_reach: str = ""
    """Selects the link by the route to an address."""
    public_ips: tuple[str, ...] = ()
    """Addresses that peers send to; empty selects the link's own addresses."""
    masquerade: bool = True
    forward_rules: bool = True
    annotation_prefix: str = "flannel.alpha.coreos.com"
    network_condition: bool = True
    """Set the Node's condition NetworkUnavailable to False."""
    repair_checksums: bool = True


class DnsConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`dns` of a NarthexConfiguration: the node-local DNS server."""

    addresses: tuple[str, ...] = ("169.254.20.10",)
    """Addresses that this node's pods query: a link-local address, those of the DNS Service, or both. They are added to
    a link of their own; empty means no link.
    """
    listen: tuple[str, ...] = ()
    """Further addresses of the node to listen on, so that the DNS Service can reach the server from other nodes."""
    zones: tuple[str, ...] = ("cluster.local.",)
    upstreams: tuple[str, ...] = ("/etc/resolv.conf",)
    """Resolvers for other names; empty disables forwarding."""
    corefile: str = ""
    """Path of a Corefile, which replaces zones and upstreams."""


class AnnouncerConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`announcer` of a NarthexConfiguration: the announcement of load balancer addresses."""

    key_file: str = ""
    """File with the keys that all announcers share, one per line; the first one signs."""
    port: int = 7947
    """UDP port of the heartbeats; the same on all nodes."""
    pools_file: str = ""
    """File with pools and advertisements, which replaces objects."""
    exclude_interfaces: tuple[str, ...] = (
        "docker*", "br-*", "cbr*", "cni*", "dummy*", "virbr*", "lxcbr*", "veth*", "cali*", "lxc*", "tunl*", "flannel*",
        "vxlan*", "kube-ipvs*", "nodelocaldns*",
    )  # fmt: skip
    """Patterns of links on which nothing is announced: those of pods and virtual machines on this node."""
    ignore_exclude_label: bool = False
    """Announce also on nodes with the label that excludes them from load balancers."""


class OwnConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """NarthexConfiguration: the fields that kube-proxy does not have."""

    strict_source_ranges: bool = False
    """Apply `loadBalancerSourceRanges` to node ports and external IPs too (row 29.16)."""
    strict_node_port_addresses: bool = False
    """An IP family that `nodePortAddresses` does not name opens no node port (row 29.17)."""
    explain_service: str = ""
    """`namespace/name` of a Service whose decisions are logged; empty for none."""
    connection_metrics: str = "endpoints"
    """Granularity of the metrics of new connections: `endpoints`, `services`, or `off`."""
    connection_series: int = 10000
    """Limit of these metrics' series; Services have priority over endpoints."""
    udp_idle_timeout: float = 30.0
    """userspace only: after this idle time a UDP client may get another endpoint (row 25.7)."""
    socket_load_balancing: bool = False
    """nftables only: send sockets to endpoints when they connect."""
    socket_load_balancing_cgroup: str = ""
    """The cgroup (version 2) whose sockets these are; empty for the root of the hierarchy."""
    endpoint_ejection: bool = False
    """With socket load balancing: endpoints that connections fail to reach get no new sockets for a limited time."""
    verify_changes: bool = False
    """Prove each change set before it is written, in the modes of `VERIFIED_MODES`."""
    parts: NodeParts = NodeParts()
    cni: CniConfiguration = CniConfiguration()
    overlay: OverlayConfiguration = OverlayConfiguration()
    dns: DnsConfiguration = DnsConfiguration()
    announcer: AnnouncerConfiguration = AnnouncerConfiguration()


class ProxyConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """A valid KubeProxyConfiguration with its NarthexConfiguration. Without arguments, it holds the defaults."""

    mode: str = DEFAULT_MODE
    feature_gates: tuple[tuple[str, bool], ...] = ()
    client_connection: ClientConnection = ClientConnection()
    logging: LoggingConfiguration = LoggingConfiguration()
    hostname_override: str = ""
    bind_address: str = "0.0.0.0"
    healthz_bind_address: str = f"0.0.0.0:{HEALTHZ_PORT}"
    metrics_bind_address: str = f"127.0.0.1:{METRICS_PORT}"
    bind_address_hard_fail: bool = False
    enable_profiling: bool = False
    show_hidden_metrics_for_version: str = ""
    iptables: ModeConfiguration = ModeConfiguration()
    nftables: ModeConfiguration = ModeConfiguration(localhost_node_ports=False)
    ipvs: IpvsConfiguration = IpvsConfiguration()
    winkernel: WinkernelConfiguration = WinkernelConfiguration()
    windows_run_as_service: bool = False
    detect_local_mode: str = "ClusterCIDR"
    bridge_interface: str = ""
    interface_name_prefix: str = ""
    cluster_cidrs: tuple[str, ...] = ()
    node_port_addresses: tuple[str, ...] | None = None
    """None leaves the choice to the mode; otherwise ("primary",) or networks."""
    oom_score_adj: int = -999
    conntrack: ConntrackConfiguration = ConntrackConfiguration()
    config_sync_period: float = 900.0
    port_range: str = ""
    """userspace only: the ports of the relay."""
    own: OwnConfiguration = OwnConfiguration()

    @property
    def detection_cidrs(self) -> tuple[str, ...] | None:
        """The networks by which pods are recognized; None if `detectLocalMode` does not ask for `clusterCIDR`."""
        return self.cluster_cidrs if self.detect_local_mode == "ClusterCIDR" else None

    @property
    def relay_range(self) -> str | None:
        """`portRange`; None in modes without a relay."""
        return self.port_range if self.mode == "userspace" else None

    def rules_section(self, mode: str) -> ModeConfiguration:
        """Return the section with the masquerade settings of a mode; ipvs and userspace use `iptables` (row 27.12)."""
        return {"nftables": self.nftables}.get(mode, self.iptables)

    def timing_section(self, mode: str) -> ModeConfiguration | IpvsConfiguration:
        """Return the section with the sync periods of a mode."""
        return {"ipvs": self.ipvs}.get(mode) or self.rules_section(mode)

    def feature_gate(self, name: str) -> bool:
        """Return the state of a feature gate, one of `FEATURE_GATES`."""
        return {**FEATURE_GATES, **dict(self.feature_gates)}[name]
