"""Parsers of the plugins that change queries and responses, or answer names outside the zones of the cluster."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

import msgspec

from narthex.dns.corefile.directive import Directive
from narthex.dns.corefile.pattern import PatternError, compile_pattern
from narthex.dns.corefile.settings import (
    AclPolicy,
    AclSettings,
    ChaosSettings,
    Dns64Settings,
    HeaderSettings,
    NsidSettings,
    RewriteAnswer,
    RewriteMatch,
    RewriteRule,
    TemplateSettings,
    TlsServerSettings,
    TransferSettings,
    Zones,
)
from narthex.dns.corefile.template_text import TemplateError, compile_template
from narthex.dns.message import wire
from narthex.model import network, one_of, quoted

_MATCHES = ("exact", "prefix", "suffix", "substring", "regex")
_FIELDS = ("name", "type", "class", "ttl", "rcode", "cname")
_GROUP = re.compile(r"\{(\d{1,3})\}", re.ASCII)
_MAX_TTL = 2**31 - 1
_BITS = {"aa": wire.AA, "ra": wire.RA, "rd": wire.RD}
_ACTIONS = ("allow", "block", "filter", "drop")
_CLIENT_AUTH = ("nocert", "verify_if_given", "require_and_verify")
_MAX_STRING = 255
"""Bytes of one string of a TXT record."""
MIN_BUFSIZE, MAX_BUFSIZE, DEFAULT_BUFSIZE = 512, 4096, 1232


def parse_rewrite(directive: Directive, _block_zones: Zones) -> RewriteRule | None:
    """Parse `rewrite [continue|stop] FIELD ...`, also with the words in a block."""
    words = list(directive.words)
    if len(words) < 2:
        words += [word for option in directive.options((), other=True) for word in (option.name, *option.words)]
    else:
        directive.takes_no_block()
    stop = True
    if words and words[0].lower() in ("continue", "stop"):
        stop = words.pop(0).lower() == "stop"
    if not words:
        directive.error(f"a rule needs a field: {one_of(_FIELDS)}")
        return None
    field, *rest = words
    field = field.lower()
    if field == "edns0":
        directive.error("edns0 is not supported: EDNS options of queries are never forwarded to upstreams")
    elif field == "answer":
        directive.error("answer must follow a name rule")
    elif field not in _FIELDS:
        directive.error(f"{quoted(field)} is not a field that can be rewritten; known are {one_of(_FIELDS)}")
    else:
        found = _rewrite_fields(directive, field, rest)
        return None if found is None else RewriteRule(field=field, stop=stop, **found)  # type: ignore[arg-type]
    return None


def _rewrite_fields(directive: Directive, field: str, words: list[str]) -> dict[str, Any] | None:
    if field in ("type", "class"):
        return _numbers(directive, field, words)
    count = {"name": 2, "cname": 2, "ttl": 2, "rcode": 3}[field]
    how = "exact"
    if len(words) > count:
        how = words.pop(0).lower()
        if how not in _MATCHES:
            directive.error(f"{field}: {quoted(how)} is not a way to match; known are {one_of(_MATCHES)}")
            return None
    if len(words) < count or (field != "name" and len(words) > count):
        directive.error(f"{field}: takes [{'|'.join(_MATCHES)}] and {count} arguments")
        return None
    groups = _check_pattern(directive, words[0]) if how == "regex" else 0
    if groups is None:
        return None
    match = RewriteMatch(how=how, text=words[0] if how == "regex" else _name(words[0]))  # type: ignore[arg-type]
    found: dict[str, Any] = {"match": match}
    if field == "ttl":
        ttl = _ttl_range(directive, words[1])
        return None if ttl is None else found | {"old": ttl[0], "new": ttl[1]}
    if field == "rcode":
        codes = [wire.rcode_number(word) for word in words[1:]]
        if None in codes:
            directive.error(f"rcode: {quoted(words[1 + codes.index(None)])} is not a response code")
            return None
        return found | {"old": codes[0], "new": codes[1]}
    if not _check_groups(directive, words[1], groups if how == "regex" else -1):
        return None
    answers = _answers(directive, words[2:]) if len(words) > 2 else (how == "exact", ())
    return (
        None
        if answers is None
        else found | {"replacement": _name(words[1]), "auto": answers[0] or how == "exact", "answers": answers[1]}
    )


def _numbers(directive: Directive, field: str, words: list[str]) -> dict[str, Any] | None:
    if len(words) != 2:
        directive.error(f"{field}: takes 2 arguments")
        return None
    number = wire.type_number if field == "type" else wire.class_number
    codes = [number(word.upper()) for word in words]
    if None in codes:
        directive.error(f"{field}: {quoted(words[codes.index(None)])} is not a {field} of DNS")
        return None
    return {"old": codes[0], "new": codes[1]}


def _name(word: str) -> str:
    return word.lower() if word.endswith(".") else f"{word.lower()}."


def _ttl_range(directive: Directive, word: str) -> tuple[int, int] | None:
    """Parse `30`, `30-`, `-30`, or `30-300`."""
    match = re.fullmatch(r"(\d{1,10})|(\d{0,10})-(\d{0,10})", word, re.ASCII)
    if match is not None and word != "-":
        low = int(match[1] or match[2] or 0)
        high = int(match[1] or match[3] or _MAX_TTL)
        if low <= high <= 2**32 - 1:
            return low, high
    directive.error(f"ttl: {quoted(word)} is not a TTL such as 30, or a range such as 30-300, 30-, or -300")
    return None


def _check_pattern(directive: Directive, pattern: str) -> int | None:
    """Return the number of groups; None after an error."""
    try:
        return compile_pattern(pattern).groups
    except PatternError as error:
        directive.error(f"{quoted(pattern)} is not a regular expression: {error}")
        return None


def _check_groups(directive: Directive, replacement: str, groups: int) -> bool:
    """Return True if a replacement refers only to groups that exist. `groups` is -1 if it is plain text."""
    numbers = {int(number) for number in _GROUP.findall(replacement)}
    if groups >= 0 and numbers and max(numbers) > groups:
        directive.error(f"{quoted(replacement)} refers to group {max(numbers)}, but the expression has {groups}")
        return False
    return True


def _answers(directive: Directive, words: list[str]) -> tuple[bool, tuple[RewriteAnswer, ...]] | None:
    """Parse `answer auto` and `answer name|value FROM TO`, several in a row."""
    auto = False
    found: list[RewriteAnswer] = []
    if words[0] != "answer":
        directive.error(f"{quoted(words[0])} is not an option; known is answer")
        return None
    while words:
        if words[0] == "answer":
            words = words[1:]
        part, rest = (words[0] if words else ""), words[1:]
        if part == "auto":
            auto, words = True, rest
            continue
        if part not in ("name", "value") or len(rest) < 2:
            directive.error("answer takes auto, or name or value with an expression and its replacement")
            return None
        groups = _check_pattern(directive, rest[0])
        if groups is None or not _check_groups(directive, rest[1], groups):
            return None
        found.append(RewriteAnswer(part=part, pattern=rest[0], replacement=_name(rest[1])))  # type: ignore[arg-type]
        words = rest[2:]
    if auto and any(each.part == "name" for each in found):
        directive.error("answer auto and answer name exclude each other")
        return None
    return auto, tuple(found)


_TEMPLATE = ("match", "answer", "additional", "authority", "rcode", "ederror", "fallthrough", "upstream", "var", "expr")
_SECTIONS = {"answer": "answers", "additional": "additional", "authority": "authorities"}


def parse_template(directive: Directive, block_zones: Zones) -> TemplateSettings | None:
    """Parse `template CLASS TYPE [ZONE...] { … }`."""
    if not directive.takes(2):
        return None
    qclass, qtype = wire.class_number(directive.words[0]), wire.type_number(directive.words[1])
    if qclass is None:
        directive.error(f"{quoted(directive.words[0])} is not a class of DNS, such as IN or ANY")
    if qtype is None:
        directive.error(f"{quoted(directive.words[1])} is not a type of DNS, such as A or ANY")
    patterns: list[str] = []
    sections: dict[str, list[str]] = {}
    found: dict[str, Any] = {}
    for option in directive.options(_TEMPLATE):
        if option.name in ("var", "expr"):
            option.error("is not supported: its language of expressions belongs to CoreDNS; write a match instead")
        elif option.name == "match" and option.takes(1):
            patterns += [word for word in option.words if _check_pattern(option, word) is not None]
        elif option.name in _SECTIONS and option.takes(1):
            texts = sections.setdefault(_SECTIONS[option.name], [])
            texts += [word for word in option.words if _check_template(option, word)]
        else:
            found.update(_template_option(option))
    if qclass is None or qtype is None:
        return None
    return TemplateSettings(
        zones=directive.zones(directive.words[2:], block_zones),
        qclass=qclass,
        qtype=qtype,
        patterns=tuple(patterns) or (".*",),
        **found | {name: tuple(texts) for name, texts in sections.items()},
    )


def _check_template(option: Directive, text: str) -> bool:
    try:
        compile_template(text)
    except TemplateError as error:
        option.error(f"{quoted(text)} {error}")
        return False
    return True


def _template_option(option: Directive) -> dict[str, Any]:
    words = option.words
    if option.name == "fallthrough":
        return {"fallthrough": option.zones(words, (".",))}
    if option.name == "rcode" and option.takes(1, 1):
        rcode = wire.rcode_number(words[0])
        if rcode is not None and not words[0].isdecimal():
            return {"rcode": rcode}
        option.error(f"{quoted(words[0])} is not a response code such as NXDOMAIN")
    if option.name == "ederror" and option.takes(1, 2):
        code = option.whole(words[0], 0, 65535)
        return {} if code is None else {"extended_error": code, "extended_text": "".join(words[1:])}
    return {}


def parse_acl(directive: Directive, block_zones: Zones) -> AclSettings:
    """Parse `acl [ZONE...] { ACTION [type TYPE...] [net NETWORK...] }`."""
    policies = []
    for option in directive.options(_ACTIONS, other=True):
        action = option.name.lower()
        if action not in _ACTIONS:
            option.error(f"is not an action; known are {one_of(_ACTIONS)}")
            continue
        policy = _policy(option)
        if policy is not None:
            policies.append(AclPolicy(action=action, types=policy[0], networks=policy[1]))  # type: ignore[arg-type]
    return AclSettings(zones=directive.zones(directive.words, block_zones), policies=tuple(policies))


def _policy(option: Directive) -> tuple[tuple[int, ...], tuple[str, ...]] | None:
    sections: dict[str, list[str]] = {}
    section: list[str] | None = None
    for word in option.words:
        if word.lower() in ("type", "net"):
            section = sections.setdefault(word.lower(), [])
        elif section is None:
            option.error(f"{quoted(word)} is neither type nor net")
            return None
        else:
            section.append(word)
    if empty := [name for name, words in sections.items() if not words]:
        option.error(f"{empty[0]} needs a value, or *")
        return None
    types, networks = [], []
    for word in () if "*" in sections.get("type", ()) else sections.get("type", ()):
        number = wire.type_number(word.upper())
        if number is None:
            option.error(f"{quoted(word)} is not a type of DNS, such as A")
            return None
        types.append(number)
    for word in () if "*" in sections.get("net", ()) else sections.get("net", ()):
        try:
            networks.append(network(word if "/" in word else f"{word}/{128 if ':' in word else 32}"))
        except ValueError:
            option.error(f"{quoted(word)} is neither an address nor a network such as 10.0.0.0/8")
            return None
    return tuple(dict.fromkeys(types)), tuple(dict.fromkeys(networks))


def parse_dns64(directive: Directive, _block_zones: Zones) -> Dns64Settings:
    """Parse `dns64 [PREFIX] { … }`."""
    found = Dns64Settings()
    prefixes = list(directive.words) if directive.takes(0, 1) else []
    for option in directive.options(("prefix", "translate_all", "allow_ipv4")):
        if option.name == "prefix":
            prefixes += option.words if option.takes(1, 1) else ()
        elif option.takes(0, 0):
            found = msgspec.structs.replace(found, **{option.name: True})
    for prefix in prefixes:
        try:
            parsed = ipaddress.IPv6Network(prefix)
            valid = parsed.prefixlen in (32, 40, 48, 56, 64, 96)
        except ValueError:
            valid = False
        if valid:
            found = msgspec.structs.replace(found, prefix=prefix)
        else:
            directive.error(f"{quoted(prefix)} is not an IPv6 network of 32, 40, 48, 56, 64, or 96 bits")
    return found


def parse_header(directive: Directive, _block_zones: Zones) -> HeaderSettings:
    """Parse `header { query|response set|clear BIT... }`. The last word about a bit counts."""
    directive.takes(0, 0)
    found = {"query_set": 0, "query_clear": 0, "response_set": 0, "response_clear": 0}
    for option in directive.options(("query", "response")):
        action = option.words[0].lower() if option.takes(2) else ""
        if action not in ("set", "clear"):
            option.error("takes set or clear, and bits")
            continue
        for word in option.words[1:]:
            bit = _BITS.get(word.lower())
            if bit is None:
                option.error(f"{quoted(word)} is not a bit that can be changed; known are {one_of(_BITS)}")
                continue
            found[f"{option.name}_{action}"] |= bit
            found[f"{option.name}_{'clear' if action == 'set' else 'set'}"] &= ~bit
    if not directive.node.children:
        directive.error("needs a block with query or response")
    return HeaderSettings(**found)


def parse_nsid(directive: Directive, _block_zones: Zones) -> NsidSettings:
    """Parse `nsid [DATA...]`."""
    directive.takes_no_block()
    return NsidSettings(data=" ".join(directive.words))


def parse_chaos(directive: Directive, _block_zones: Zones) -> ChaosSettings:
    """Parse `chaos [VERSION] [AUTHOR...]`."""
    directive.takes_no_block()
    if any(len(word.encode()) > _MAX_STRING for word in directive.words):
        directive.error(f"a text has more than {_MAX_STRING} bytes")
    version, *authors = directive.words or ("narthex",)
    return ChaosSettings(version=version, authors=tuple(sorted(set(authors))))


def parse_bufsize(directive: Directive, _block_zones: Zones) -> int:
    """Parse `bufsize [SIZE]`."""
    directive.takes_no_block()
    if not directive.takes(0, 1) or not directive.words:
        return DEFAULT_BUFSIZE
    return directive.whole(directive.words[0], MIN_BUFSIZE, MAX_BUFSIZE) or DEFAULT_BUFSIZE


def parse_transfer(directive: Directive, block_zones: Zones) -> TransferSettings:
    """Parse `transfer [ZONE...] { to ADDRESS... }`."""
    to: list[str] = []
    for option in directive.options(("to", "source")):
        if option.name == "source":
            option.error("is not supported: no NOTIFY is sent")
            continue
        for word in option.words if option.takes(1) else ():
            if word == "*":
                to.append(word)
                continue
            try:
                # The port is that of NOTIFY, which is not sent.
                host = (
                    re.fullmatch(r"\[?([^\]]+?)\]?(?::\d{1,5})?", word) if word.count(":") < 2 or "[" in word else None
                )
                to.append(str(ipaddress.ip_address(host[1] if host else word)))
            except ValueError:
                option.error(f"{quoted(word)} is neither an address nor *")
    if not to:
        directive.error("needs to with addresses, or *")
    return TransferSettings(zones=directive.zones(directive.words, block_zones), to=tuple(dict.fromkeys(to)))


def parse_tls(directive: Directive, _block_zones: Zones) -> TlsServerSettings | None:
    """Parse `tls CERT KEY [CA] { client_auth … }`."""
    auth = "nocert"
    for option in directive.options(("client_auth", "keylog")):
        if option.name == "keylog":
            option.error("is not supported: any reader of the file can decrypt all connections")
        elif option.takes(1, 1):
            if option.words[0] in _CLIENT_AUTH:
                auth = option.words[0]
            else:
                reason = (
                    "not supported: it accepts unverified certificates; "
                    if option.words[0] in ("request", "require")
                    else ""
                )
                option.error(f"{quoted(option.words[0])} is {reason or 'unknown; '}known are {one_of(_CLIENT_AUTH)}")
    if not directive.words:
        directive.error("needs the files of a certificate and its key: ACME is not supported")
        return None
    if not directive.takes(2, 3):
        return None
    certificate, key, *authority = directive.words
    return TlsServerSettings(
        certificate=certificate,
        key=key,
        authority="".join(authority),
        client_auth=auth,  # type: ignore[arg-type]
    )
