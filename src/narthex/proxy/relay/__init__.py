"""The relay of mode userspace: a process that accepts connections and connects to endpoints."""
