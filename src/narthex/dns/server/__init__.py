"""The I/O of a worker: sockets, event loop, plugin chains, and upstreams."""
