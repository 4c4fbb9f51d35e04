"""The kernel as a witness: real packets in network namespaces."""
