"""Other names and addresses in an issue text, the same one for the same, everywhere.

Words that Kubernetes, its proxies, and the kernel's tools define stay as they are; any other word of a name, a comment, or a chain is
replaced. Names are replaced label by label, so that a DNS name stays the name of the Service that it named.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from narthex.trace.issue.addresses import AddressReplacements
from narthex.trace.issue.facts import json_lines
from narthex.trace.issue.text import IssueNode, IssueQuestion, IssueText, IssueTextError

_V4 = r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?:/\d{1,2}(?!\d))?(?![\d.]*\d)"
_V6 = r"(?<![0-9A-Fa-f:.])(?=[0-9A-Fa-f]{0,4}:)[0-9A-Fa-f:]{2,39}(?:(?<=:)(?:\d{1,3}\.){3}\d{1,3})?(?:/\d{1,3}(?!\d))?(?![0-9A-Fa-f:])"
_ADDRESS = re.compile(f"{_V6}|{_V4}")
_MAC = re.compile(r"(?<![0-9a-fA-F:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![0-9a-fA-F:])")
_WORD = re.compile(r"[A-Za-z0-9_]+(?:-+[A-Za-z0-9_]+)*")
_HASHED = re.compile(
    r"(?<![A-Za-z0-9])((?:KUBE|CNI|DOCKER|NARTHEX)(?:-[A-Z0-9]+)*-)([A-Z2-7]{16}|[0-9a-f]{16,32})(?![A-Za-z0-9])"
)

_KEPT_WORDS_TEXT = (
    "default system public lease kubernetes Kubernetes kube dns proxy coredns narthex svc cluster local localhost outside pod service node "
    "address tcp udp sctp icmp icmpv6 ip ip6 http https metrics "
    # comments, chains, sets, and tables of kube-proxy, Narthex, flannel, and the CNI plugins
    "portals postrouting rules requiring SNAT nodeports nodeport NOTE this must be the last rule in chain IP load balancer loadbalancer "
    "external externally visible internal healthcheck health check port ports has no endpoints endpoint masquerade mark traffic for to from "
    "pods forwarding conntrack off not a on via firewall masquerading hairpin block incoming localnet connections Destination set source "
    "range and destinations destination affinity services cluster ips nat filter mangle raw prerouting input forward output access dst src "
    "clusterIP externalIP nodePort loadBalancer p with any of flannel flanneld masq name hostport DNAT dnat snat route LOCAL redirect "
    "sticky maglev send stick pick reject drop accept ipvs purpose solving TCP UDP SCTP hash c cm d r m l n cidrs addresses restricted "  # codespell:ignore sticky
    "relay handed over by its handle ClusterIPs before NodePort Ensure that non can flow itself is reached "
    "allowed sources ranges only all other guard jump own probe access"
)
KEPT_WORDS = frozenset(_KEPT_WORDS_TEXT.split())
"""Words that are no secret: of Kubernetes and of the programs that write rules."""
_KEPT_CHAIN = re.compile(
    r"(?:KUBE|CNI|DOCKER|FLANNEL|NARTHEX|cali|ufw6?|f2b|LIBVIRT|FORWARD|nm|fw)(?:[-_]|$)|(?:PREROUTING|INPUT|FORWARD|OUTPUT|POSTROUTING)$"
)
_KEPT_LINK = re.compile(
    r"(?:lo|all|default|(?:eth|en[opsx]|ens|enp|wlan|bond|team|cni|docker|flannel|vxlan|tunl|ip6tnl|sit|gre|wg|kube-|nodelocal|cilium_|br|virbr)[\w.+*-]*"
    r"|(?:veth|cali|lxc|eni)[+*]?)$"
)
_PEER_LINK = re.compile(r"(veth|cali|lxc|eni|br-|azv|gke)(.+)$")


class Anonymizer:
    """Replaces the names and addresses of one issue text."""

    def __init__(self, content: IssueText, key: bytes) -> None:
        """Collect the addresses of a text; `key` decides what replaces them. Raises IssueTextError for rules in JSON."""
        for path, text in ((path, text) for node in content.nodes for path, text in node.parts.items()):
            if path.startswith("rules/") and text.lstrip().startswith("{"):
                raise IssueTextError(
                    f"{path} is JSON, in which nothing can be replaced; `nft list ruleset` prints text"
                )
        self._key = key
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._links: dict[str, str] = {}
        self._chains: dict[str, str] = {}
        texts = [text for node in content.nodes for text in node.parts.values()]
        words = " ".join((*content.question.node_ips, content.question.source, content.question.destination))
        self._addresses = AddressReplacements(
            {part for text in (*texts, words) for part, is_address in _split(text) if is_address}, key
        )
        for node in content.nodes:
            self._name(node.node, "node")
            for path in ("nodes", "services", "pods"):
                for item in _objects(node.parts.get(f"objects/{path}.json", "")):
                    meta = item.get("metadata") or {}
                    self._name(str(meta.get("namespace", "")), "namespace")
                    self._name(str(meta.get("name", "")), path.removesuffix("s"))

    def anonymized(self, content: IssueText) -> IssueText:
        """Return the text with other names and addresses."""
        return IssueText(question=self._question(content.question), nodes=tuple(map(self._node, content.nodes)))

    # ---- single values -----------------------------------------------------------------------------------------------

    def address(self, text: str) -> str:
        """Return the replacement of an address or network."""
        return self._addresses.replaced(text)

    def words(self, text: str) -> str:
        """Return a text with other addresses, and other words where they are not known."""
        return self._labels(self.addresses(text))

    def addresses(self, text: str) -> str:
        """Return a text with other addresses only."""
        text = _MAC.sub(lambda found: self._mac(found[0]), text)
        return "".join(self.address(part) if is_address else part for part, is_address in _split(text))

    def _labels(self, text: str) -> str:
        """Return a text whose addresses have been replaced with other words where they are not known."""
        parts = _split(self._hashes(text))
        return "".join(part if is_address else _WORD.sub(self._word, part) for part, is_address in parts)

    def _word(self, found: re.Match[str]) -> str:
        return self._name(found[0])

    def _name(self, text: str, kind: str = "name") -> str:
        """Return the replacement of a name, label by label. `kind` begins those that are new."""
        return ".".join(
            self._label(label, kind if not number else "domain") for number, label in enumerate(text.split("."))
        )

    def _label(self, label: str, kind: str) -> str:
        if all(part in KEPT_WORDS or part.isdigit() for part in label.split("-") if part):
            return label
        if label not in self._names:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._names[label] = f"{kind}-{self._counts[kind]}"
        return self._names[label]

    def _hashes(self, text: str) -> str:
        return _HASHED.sub(lambda found: found[1] + self._digest(found[2]), text)

    def _digest(self, text: str) -> str:
        """Return other characters of the same alphabet and number."""
        digest = hmac.digest(self._key, text.encode(), hashlib.sha256)
        lower = text.islower() or text.isdigit()
        made = digest.hex() if lower else base64.b32encode(digest).decode()
        return made[: len(text)]

    def _mac(self, text: str) -> str:
        if text == "00:00:00:00:00:00" or text.lower() == "ff:ff:ff:ff:ff:ff":
            return text
        digest = hmac.digest(self._key, text.lower().encode(), hashlib.sha256).hex()
        return ":".join(("02", *(digest[n : n + 2] for n in range(0, 10, 2))))

    def link(self, name: str) -> str:
        """Return the replacement of an interface's name. Names that systems give stay, and so do prefixes in rules."""
        if not name or _KEPT_LINK.match(name):
            return name
        if name not in self._links:
            peer = _PEER_LINK.match(name)
            prefix = peer[1] if peer else "link"
            digest = hmac.digest(self._key, name.rstrip("+*").encode(), hashlib.sha256).hex()[:6]
            self._links[name] = f"{prefix}{digest}" + ("+" if name.endswith("+") else "*" if name.endswith("*") else "")
        return self._links[name]

    def chain(self, name: str) -> str:
        """Return the replacement of the name of a chain, set, or table. Addresses in it have been replaced."""
        if _KEPT_CHAIN.match(name):
            return self._hashes(name)
        hashed = _NAMED_CHAIN.match(name)
        return f"{hashed[1]}{self._digest(hashed[2])}-{self._labels(hashed[3])}" if hashed else self._labels(name)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _question(self, question: IssueQuestion) -> IssueQuestion:
        return msgspec.structs.replace(
            question,
            source=self.words(question.source),
            destination=self.words(question.destination),
            node=self._name(question.node) if question.node else "",
            iif=self.link(question.iif),
            domain=self.words(question.domain),
            node_ips=tuple(map(self.address, question.node_ips)),
        )

    def _node(self, node: IssueNode) -> IssueNode:
        parts = {path: self._part(path, text) for path, text in node.parts.items()}
        return IssueNode(
            node=self._name(node.node), parts=parts, failed=dict.fromkeys(node.failed, "it could not be taken")
        )

    def _part(self, path: str, text: str) -> str:
        if path.startswith("objects/"):
            items = [self._json(each, "") for each in _objects(text)]
            return '{"apiVersion":"v1","kind":"List","items":\n' + json_lines(items).rstrip("\n") + "}\n"
        if path.endswith(".json"):
            return (
                json_lines(self._json(each, "") for each in json.loads(text))
                if text.startswith("[")
                else self.addresses(text)
            )
        lines = text.split("\n")
        change: Callable[[str], str] = self.addresses
        if path == "net/sysctls.txt":
            change = self._setting
        elif path.startswith("rules/nft"):
            change = self._nft_line
        elif path.startswith("rules/ip") and not path.startswith("rules/ipvs"):
            change = self._saved_line
        return "\n".join(map(change, lines))

    def _setting(self, line: str) -> str:
        return re.sub(r"(?<=\.conf\.)[^.\s=]+", lambda found: self.link(found[0]), line)

    def _saved_line(self, line: str) -> str:
        """Return a line of iptables-save or ipset."""
        line = self.addresses(line)
        if line.startswith("# relay "):
            return self._labels(line)
        line = _SAVED_COMMENT.sub(lambda found: self._labels(found[0].replace("\\", "")), line)
        line = _SAVED_NAME.sub(lambda found: found[0] if found[0] in _TARGETS else self.chain(found[0]), line)
        return _SAVED_LINK.sub(lambda found: self.link(found[0]), line)

    def _nft_line(self, line: str) -> str:
        """Return a line of `nft list ruleset`."""
        line = self.addresses(line)
        line = _NFT_COMMENT.sub(lambda found: self._labels(found[0]), line)
        line = _NFT_LINKS.sub(lambda found: _QUOTED.sub(lambda name: f'"{self.link(name[1])}"', found[0]), line)
        return _NFT_NAME.sub(lambda found: found[1] + self.chain(found[2]), line)

    def _json(self, value: Any, key: str) -> Any:
        """Return JSON with other names and addresses; `key` is the field that holds the value."""
        if isinstance(value, list):
            return [self._json(each, key) for each in value]
        if isinstance(value, dict):
            named = key in ("labels", "selector", "matchLabels")
            return {(self._label_key(one) if named else one): self._json(each, one) for one, each in value.items()}
        if not isinstance(value, str) or key in _DEFINED:
            return value
        if key in _LINKS:
            return self.link(value)
        if key in _ADDRESSES or "/" in key:
            return self.addresses(value) if "service-name" not in key and "hostname" not in key else self._name(value)
        return self.words(value)

    def _label_key(self, key: str) -> str:
        domain, slash, _ = key.rpartition("/")
        return key if slash and domain.endswith(("kubernetes.io", "k8s.io")) else self.words(key)


_NAMED_CHAIN = re.compile(r"([a-z-]+-)([A-Z0-9]{8})-(.+)$")
"""A chain of kube-proxy's nftables mode, which has the name of a Service port."""
_SAVED_COMMENT = re.compile(r'(?<=--comment )(?:"(?:[^"\\]|\\.)*"|\S+)')
_SAVED_NAME = re.compile(
    r"(?:(?<=^:)|(?<=^-A )|(?<=\] -A )|(?<= -j )|(?<= -g )|(?<=--match-set )|(?<=^add )|(?<=^create )|(?<=--name ))\S+"
)
_SAVED_LINK = re.compile(r"(?<= -[io] )\S+")
_NFT_COMMENT = re.compile(r'(?<=comment )"[^"]*"')
_NFT_LINKS = re.compile(r'(?:iif|oif)(?:name)? [^"]*(?:"[^"]*"[^"]*)+')
_QUOTED = re.compile(r'(?<!comment )"([^"]*)"')
_NFT_NAME = re.compile(r"(^\t(?:chain|set|map) |\b(?:jump|goto) |^table (?:ip6?|inet) |@)([^\s{},;]+)")
_TARGETS_TEXT = "ACCEPT DROP REJECT RETURN MARK CONNMARK DNAT SNAT MASQUERADE REDIRECT LOG TCPMSS CT NFLOG NOTRACK SET TRACE NFQUEUE"
_TARGETS = frozenset(_TARGETS_TEXT.split())
_DEFINED_TEXT = (
    "apiVersion kind type status reason protocol addressType phase scope ipFamilies ipFamilyPolicy sessionAffinity externalTrafficPolicy "
    "internalTrafficPolicy trafficDistribution state info_kind info_slave_kind flags family table deletionTimestamp operator ipMode "
    "action link_type appProtocol"
)
_DEFINED = frozenset(_DEFINED_TEXT.split())
"""Fields with words of Kubernetes or of the kernel."""
_LINKS_TEXT = "ifname dev link master iif oif label vxlan_link"
_LINKS = frozenset(_LINKS_TEXT.split())
_ADDRESSES_TEXT = (
    "dst src gateway host prefsrc local local6 lladdr mac ip podIP hostIP clusterIP clusterIPs externalIPs addresses podCIDR podCIDRs "
    "loadBalancerSourceRanges loadBalancerIP"
)
_ADDRESSES = frozenset(_ADDRESSES_TEXT.split())


def _split(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text in order: addresses and networks, with True, and what is between them."""
    at = 0
    for found in _ADDRESS.finditer(text):
        for candidate in (found[0], found[0].partition("/")[0]):
            try:
                ipaddress.ip_interface(candidate)
            except ValueError:
                continue
            yield text[at : found.start()], False
            yield candidate, True
            at = found.start() + len(candidate)
            break
    yield text[at:], False


def _objects(text: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = json.loads(text)["items"] if text else []
    return items
