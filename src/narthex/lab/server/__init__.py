"""The lab's API on the machine: sockets, TLS, and a file that keeps what it holds."""
