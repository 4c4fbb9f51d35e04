"""A seeded, deterministic simulation of the proxy process: API server, network, clock, kernel, and other programs."""
