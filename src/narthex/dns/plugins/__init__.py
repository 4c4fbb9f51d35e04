"""CoreDNS plugins that need no I/O: cache, forward, hosts, log, and others. Pure."""
