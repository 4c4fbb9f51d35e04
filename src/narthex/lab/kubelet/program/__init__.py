"""The lab's kubelet: runs pods, probes them, and reports their status."""
