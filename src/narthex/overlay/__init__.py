"""Routes between the Pod networks of nodes, compatible with flannel."""
