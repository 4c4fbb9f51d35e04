"""The lab: a cluster of network namespaces on one machine, as data and small controllers. Pure."""
