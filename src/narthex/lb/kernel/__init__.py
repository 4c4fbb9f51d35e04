"""Sockets and links of an announcer, in the network namespace of the calling thread."""
