"""Sockets and links of an announcer. All of it concerns the network namespace of the calling thread."""
