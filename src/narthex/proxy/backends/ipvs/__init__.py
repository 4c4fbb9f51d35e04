"""The ipvs backend: virtual servers, sets, and fixed rules. Pure."""
