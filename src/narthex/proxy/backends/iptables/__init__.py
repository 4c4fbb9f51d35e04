"""The iptables backend: the chains and names of kube-proxy. Pure."""
