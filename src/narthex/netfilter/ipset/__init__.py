"""Sets of the kernel facility ipset. Pure."""
