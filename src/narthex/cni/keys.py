"""Keys of configurations and of plugins' output, which match their documented spelling in any case, as in Go's encoding/json.

containerd passes port mappings as `HostPort` and `ContainerPort`, because its library marshals a structure without JSON tags.
"""

from __future__ import annotations

from narthex.cni.errors import DECODING_FAILURE, CniError

MATCHED_KEYS = (
    "address", "advmss", "args", "backend", "bridge", "capabilities", "cni", "cni.dev/attachments", "cni.dev/valid-attachments",
    "cniVersion", "code", "conditionsV4", "conditionsV6", "containerID", "containerPort", "dataDir", "delegate", "details",
    "disableContainerInterface", "dns", "domain", "dst", "enabledad", "externalSetMarkChain", "forceAddress", "gateway", "gw",
    "hairpinMode", "hostIP", "hostPort", "id", "ifname", "interface", "interfaces", "ip", "ip4", "ip6", "ipMasq", "ipMasqBackend",
    "ipRanges", "ipam", "ips", "isDefaultGateway", "isGateway", "mac", "macspoofchk", "markMasqBit", "masqAll", "maxID", "minID",
    "msg", "mtu", "name", "nameservers", "options", "pciID", "portIsolation", "portMappings", "preserveDefaultVlan", "prevResult",
    "priority", "promiscMode", "protocol", "rangeEnd", "rangeStart", "ranges", "resolvConf", "routes", "runtimeConfig", "sandbox",
    "scope", "search", "snat", "socketPath", "subnet", "subnetFile", "table", "throughNode", "type", "vlan", "vlanTrunk",
)  # fmt: skip
_SPELLINGS = {key.lower(): key for key in MATCHED_KEYS}


def spelled_as_documented(value: object) -> object:
    """Return JSON with the documented spelling of each key, in objects at any depth. Unknown keys stay as they are.

    Raises CniError if an object has two keys that differ in case only: Go takes the last one, other parsers the first.
    """
    if isinstance(value, list):
        return [spelled_as_documented(one) for one in value]
    if not isinstance(value, dict):
        return value
    spelled: dict[str, object] = {}
    for key, one in value.items():
        # Go folds the long s and the Kelvin sign, too, but no letter to two.
        known = _SPELLINGS.get(key.replace("\u017f", "s").lower()) or str(key)
        if known in spelled:
            raise CniError(DECODING_FAILURE, f"the key {known!r} is given twice, in different case")
        spelled[known] = spelled_as_documented(one)
    return spelled
