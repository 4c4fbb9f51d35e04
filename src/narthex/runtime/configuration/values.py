"""A checked KubeProxyConfiguration as values, with kube-proxy's defaults (behaviours of group 27). Times are in seconds."""

from __future__ import annotations

import msgspec

DEFAULT_MODE = "nftables"
HEALTHZ_PORT = 10256
METRICS_PORT = 10249


class ModeConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`iptables` and `nftables`: what these modes have in common."""

    masquerade_bit: int = 14
    masquerade_all: bool = False
    localhost_node_ports: bool = True
    """iptables only."""
    sync_period: float = 30.0
    min_sync_period: float = 0.0
    """kube-proxy's default of a second protects its API server's clients from each other; who edits a manifest or scales a
    Deployment wants to see the effect at once, and what comes while a sync runs is one sync anyway."""


class IpvsConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`ipvs`."""

    sync_period: float = 30.0
    min_sync_period: float = 0.0
    scheduler: str = ""
    exclude_cidrs: tuple[str, ...] = ()
    strict_arp: bool = False
    tcp_timeout: float = 0.0
    """0: left as it is, like the next two."""
    tcp_fin_timeout: float = 0.0
    udp_timeout: float = 0.0


class ConntrackConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`conntrack`."""

    max_per_core: int = 32768
    """0: the limit is left as it is."""
    min: int = 131072
    tcp_established_timeout: float = 86400.0
    tcp_close_wait_timeout: float = 3600.0
    tcp_be_liberal: bool = False
    udp_timeout: float = 0.0
    udp_stream_timeout: float = 0.0


class ClientConnection(msgspec.Struct, frozen=True, kw_only=True):
    """`clientConnection`."""

    kubeconfig: str = ""
    """Path; empty: the service account of the pod."""
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
    """`parts` of a NarthexConfiguration: what `narthex node` runs."""

    proxy: bool = True
    cni: bool = False
    overlay: bool = False
    dns: bool = False
    announcer: bool = False


class CniConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`cni` of a NarthexConfiguration: the CNI plugins' agent."""

    socket: str = "/run/narthex/cni.sock"
    """Where it listens; the plugins look there (`narthex cni install --socket`)."""
    state_directory: str = "/var/lib/cni/narthex"
    """Where it has its records, as the plugins do (`--state-dir`)."""


class OverlayConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`overlay` of a NarthexConfiguration: the ways between nodes' pods."""

    net_conf: str = "/etc/kube-flannel/net-conf.json"
    """flannel's configuration file."""
    subnet_file: str = "/run/flannel/subnet.env"
    """What is written for the CNI plugin `flannel`."""
    interfaces: tuple[str, ...] = ()
    """Names or addresses of links to the other nodes; the first that is there."""
    interface_patterns: tuple[str, ...] = ()
    """The same as regular expressions."""
    interface_can_reach: str = ""
    """The same by where packets to an address leave."""
    public_ips: tuple[str, ...] = ()
    """What others shall send to; empty: the link's own addresses."""
    masquerade: bool = True
    forward_rules: bool = True
    annotation_prefix: str = "flannel.alpha.coreos.com"
    network_condition: bool = True
    """The Node's condition NetworkUnavailable is set to False."""
    repair_checksums: bool = True


class DnsConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`dns` of a NarthexConfiguration: names answered on the node itself."""

    addresses: tuple[str, ...] = ("169.254.20.10",)
    """Where this node's pods ask: a link-local address, those of the DNS Service, or both. They are made; none: no link."""
    listen: tuple[str, ...] = ()
    """Addresses of the node to answer on besides, so that the DNS Service can lead here from others."""
    zones: tuple[str, ...] = ("cluster.local.",)
    upstreams: tuple[str, ...] = ("/etc/resolv.conf",)
    """Who answers for other names; none: nobody does."""
    corefile: str = ""
    """A Corefile instead of zones and upstreams."""


class AnnouncerConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """`announcer` of a NarthexConfiguration: who answers for load balancer addresses."""

    key_file: str = ""
    """The key that all announcers share, one a line; the first one signs."""
    port: int = 7947
    """UDP port of the heartbeats; the same on all nodes."""
    pools_file: str = ""
    """Pools and advertisements of a file, instead of objects."""
    exclude_interfaces: tuple[str, ...] = (
        "docker*", "br-*", "cbr*", "cni*", "dummy*", "virbr*", "lxcbr*", "veth*", "cali*", "lxc*", "tunl*", "flannel*",
        "vxlan*", "kube-ipvs*", "nodelocaldns*",
    )  # fmt: skip
    """Patterns of names of links that are left alone: they lead to pods and virtual machines of this node."""
    ignore_exclude_label: bool = False
    """Nodes announce although they are labelled to be left out of load balancers."""


class OwnConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """NarthexConfiguration, the second document: what kube-proxy has no words for."""

    strict_source_ranges: bool = False
    """`loadBalancerSourceRanges` guards node ports and external IPs too (row 29.16)."""
    explain_service: str = ""
    """`namespace/name` of the Service whose every decision is written to the log; empty: none."""
    connection_metrics: str = "endpoints"
    """What new connections are counted by: `endpoints`, `services` or `off`."""
    connection_series: int = 10000
    """At most so many numbers of new connections are shown; endpoints give way first."""
    udp_idle_timeout: float = 30.0
    """userspace only: a UDP client that was idle for so long may get another endpoint (row 25.7)."""
    parts: NodeParts = NodeParts()
    cni: CniConfiguration = CniConfiguration()
    overlay: OverlayConfiguration = OverlayConfiguration()
    dns: DnsConfiguration = DnsConfiguration()
    announcer: AnnouncerConfiguration = AnnouncerConfiguration()


class ProxyConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """A checked KubeProxyConfiguration, and the NarthexConfiguration beside it; made without arguments it holds the
    defaults."""

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
    """None: not set, the mode decides; ("primary",); or networks."""
    oom_score_adj: int = -999
    conntrack: ConntrackConfiguration = ConntrackConfiguration()
    config_sync_period: float = 900.0
    port_range: str = ""
    """userspace only: where the relay listens."""
    own: OwnConfiguration = OwnConfiguration()

    def rules_section(self, mode: str) -> ModeConfiguration:
        """Return the section with the masquerade settings of a mode; ipvs and userspace use `iptables` (row 27.12)."""
        return {"nftables": self.nftables}.get(mode, self.iptables)

    def timing_section(self, mode: str) -> ModeConfiguration | IpvsConfiguration:
        """Return the section with the sync periods of a mode."""
        return {"ipvs": self.ipvs}.get(mode) or self.rules_section(mode)

    def feature_gate(self, name: str, default: bool) -> bool:
        """A gate's setting."""
        return next((on for gate, on in self.feature_gates if gate == name), default)
