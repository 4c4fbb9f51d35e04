"""Programs of the lab's kubelet: run pods, probe them, report their status."""
