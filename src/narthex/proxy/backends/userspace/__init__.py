"""The userspace backend: redirect rules and the table of the relay. Pure."""
