"""The configuration files of a node's kubelet and container runtime."""

from typing import Any

DOMAIN = "cluster.local"
PAUSE_IMAGE = "narthex.example/pause:1"
"""Of the containers that hold the namespaces of pods."""
_LEAST_FREE = "1%"
"""A node evicts pods below this share of the disk; the machine's disk is shared with others."""

CONTAINERD = f"""\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
# Memory of a shared machine is not to end with the runtime.
oom_score = 0
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.tracing.processor.v1.otlp"]

[grpc]
address = "/run/containerd/containerd.sock"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = true
disable_apparmor = true
# No process of the node has CAP_SYS_RESOURCE over the machine's limits.
tolerate_missing_hugetlb_controller = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/opt/cni/bin"
conf_dir = "/etc/cni/net.d"

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"""
"""Versions 1.6 to 2 read it."""


def kubelet_configuration(dns_address: str) -> dict[str, Any]:
    """Return the KubeletConfiguration of a node, whose files are below /etc/node, with the address of the cluster's DNS."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        # All of both families; 0.0.0.0 is without IPv6.
        "address": "::",
        "clusterDNS": [dns_address],
        "clusterDomain": DOMAIN,
        "resolvConf": "/etc/node/resolv.conf",
        "staticPodPath": "",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": "/etc/node/kubelet-client.crt"},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "tlsCertFile": "/etc/node/tls.crt",
        "tlsPrivateKeyFile": "/etc/node/tls.key",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        # Limits of pods are not what is tested here, and three kubelets share a machine.
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "localStorageCapacityIsolation": True,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": _LEAST_FREE,
            "imagefs.available": _LEAST_FREE,
        },
        "imageGCHighThresholdPercent": 100,
        # Failures to change settings of the whole machine are only logged.
        "featureGates": {"KubeletInUserNamespace": True},
        "nodeStatusUpdateFrequency": "4s",
        "syncFrequency": "20s",
        "fileCheckFrequency": "20s",
        "maxPods": 100,
    }
