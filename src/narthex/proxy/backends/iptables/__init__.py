"""The iptables backend: kube-proxy's chains and names. Pure."""
