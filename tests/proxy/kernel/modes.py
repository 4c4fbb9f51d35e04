"""Modes that any kernel of today can show. IPVS is shown in tests/uml, on a kernel that has IP_VS."""

from narthex.proxy.backends import BACKENDS

MODES_HERE = tuple(sorted(mode for mode in BACKENDS if mode != "ipvs"))
