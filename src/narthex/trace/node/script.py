"""A shell script that takes a bundle on a node that has no Narthex."""

from __future__ import annotations

from narthex.trace.node.layout import CNI_DIRECTORY, CNI_FILE, FORMAT, PARTS, ROOT, SETTINGS, TABLE_FILE

_HEAD = """#!/bin/sh
# Takes a bundle of this node for `narthex trace --bundle`, `narthex check --bundle` and `narthex diff`.
# It only reads, installs nothing and needs nothing but a shell, tar and gzip; as root it sees more.
#
#     sh bundle.sh > node.tgz          or from afar:   ssh root@node sh < bundle.sh > node.tgz
#
# What is in it, and what never is: docs/reference/bundle.md
set -u
umask 077
LC_ALL=C
export LC_ALL
PATH="$PATH:/usr/sbin:/sbin:/usr/local/sbin"
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
top="$work/@ROOT@"
mkdir -p "$top/rules" "$top/net" "$top/about"
tab=$(printf '\\t')
row() { printf '%s\\t%s\\t%s\\t%s\\n' "$1" "$2" "$3" "$4" >> "$top/@TABLE@"; }
row format @FORMAT@ "$(uname -n)" script
# take PATH PROGRAM ARGUMENT...
take() {
    path=$1
    shift
    if ! command -v "$1" > /dev/null 2>&1; then
        row absent "$path" "$*" "$1 is not installed"
        return
    fi
    if "$@" > "$top/$path" 2> "$work/said"; then
        row taken "$path" "$*" ""
    else
        rm -f "$top/$path"
        row failed "$path" "$*" "$(tr '\\n\\t' '  ' < "$work/said" | cut -c1-300)"
    fi
}
"""
_SETTINGS = """
# Settings: of /proc/sys/net those that decide about packets.
find /proc/sys/net -type f 2> /dev/null | sed 's,^/proc/sys/,,' | tr './' '/.' | grep -E '@SETTINGS@' |
    while read -r name; do
        file=/proc/sys/$(printf '%s' "$name" | tr './' '/.')
        # No `read`: some shells take byte by byte, and these files give only one that way.
        value=$(cat "$file" 2> /dev/null) || continue
        printf '%s = %s\\n' "$name" "$(printf '%s' "$value" | tr '\\t' ' ')"
    done | sort > "$top/net/sysctls.txt"
row taken net/sysctls.txt /proc/sys/net ""
"""
_CNI = """
# CNI: names of the configurations and types of the plugins, nothing else.
if [ -d @CNI@ ]; then
    for file in @CNI@/*; do
        [ -f "$file" ] || continue
        types=$(grep -o '"type"[[:space:]]*:[[:space:]]*"[A-Za-z0-9_.-]*"' "$file" | sed 's/.*"\\([^"]*\\)"$/\\1/' | tr '\\n' ' ')
        printf '%s\\t%s\\n' "$(basename "$file")" "$types"
    done > "$top/@CNIFILE@"
    row taken @CNIFILE@ "ls @CNI@" ""
else
    row absent @CNIFILE@ "ls @CNI@" "No such file or directory"
fi
"""
_TAIL = """
tar -C "$work" -cf - @ROOT@ | gzip -c
"""


def script() -> str:
    """The script's text, for any POSIX shell."""
    lines = [_HEAD]
    for part in PARTS:
        if part.path == "net/sysctls.txt":
            lines.append(_SETTINGS.lstrip("\n"))
            continue
        words = " ".join(map(_quoted, part.command))
        conditions = [f'[ ! -e "$top/{other}" ]' for other in part.unless]
        conditions += [f"[ -e {part.needs} ]"] if part.needs else []
        take = f"take {part.path} {words}"
        if part.needs:
            absent = f'row absent {part.path} "{" ".join(part.command)}" "this kernel has none of it: there is no {part.needs}"'
            lines.append(f"if {' && '.join(conditions)}; then {take}; else {absent}; fi\n")
        else:
            lines.append(f"{' && '.join([*conditions, take])}\n")
    lines += [_CNI, _TAIL]
    text = "".join(lines)
    for name, value in (
        ("@ROOT@", ROOT),
        ("@TABLE@", TABLE_FILE),
        ("@FORMAT@", str(FORMAT)),
        ("@SETTINGS@", SETTINGS),
        ("@CNIFILE@", CNI_FILE),
        ("@CNI@", CNI_DIRECTORY),
    ):
        text = text.replace(name, value)
    return text


def _quoted(word: str) -> str:
    return word if word.replace("-", "").replace("_", "").isalnum() else "'" + word.replace("'", "'\\''") + "'"
