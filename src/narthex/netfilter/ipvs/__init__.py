"""Virtual servers of the kernel facility IPVS. Pure."""
