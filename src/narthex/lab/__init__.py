"""A Kubernetes cluster on one machine, made of network namespaces. See README.md."""
