"""The userspace backend: rules that redirect to a relay, and the table of the relay. Pure."""
