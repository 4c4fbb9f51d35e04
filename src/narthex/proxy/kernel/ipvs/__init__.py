"""The IPVS target."""
