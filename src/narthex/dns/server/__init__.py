"""DNS on this machine: sockets, the loop of a worker, and servers to ask."""
