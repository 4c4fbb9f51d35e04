"""The IPVS backend. Pure."""
