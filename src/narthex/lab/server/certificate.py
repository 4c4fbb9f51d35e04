"""The server's certificate: self-signed for the addresses at which it listens, made by `openssl`."""

from __future__ import annotations

import ipaddress
import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from narthex.linux.run import run

_DAYS = 3650


class Certificate(msgspec.Struct, frozen=True):
    """A certificate and its key in PEM."""

    certificate: str
    """The certificate, which is its own authority."""
    key: str

    def context(self, clients: str = "") -> ssl.SSLContext:
        """Return the TLS context of a server. `clients` is the certificate in PEM that clients must have; empty: any client."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if clients:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=clients)
        with tempfile.TemporaryDirectory(prefix="narthex-") as folder:
            # The ssl module reads certificates from files only.
            both = Path(folder) / "both.pem"
            both.touch(0o600)
            both.write_text(self.key + self.certificate)
            context.load_cert_chain(both)
        return context


def make(names: Sequence[str], usage: str = "serverAuth") -> Certificate:
    """Make a certificate for addresses and names. `usage` is its `extendedKeyUsage`. Raises CommandError."""
    listed = ",".join(f"IP:{name}" if _is_address(name) else f"DNS:{name}" for name in names)
    with tempfile.TemporaryDirectory(prefix="narthex-") as folder:
        key, certificate = Path(folder) / "key.pem", Path(folder) / "certificate.pem"
        how = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=narthex-lab"
        extensions = (
            f"subjectAltName={listed}",
            "basicConstraints=critical,CA:TRUE",
            "keyUsage=critical,digitalSignature,keyCertSign",
            f"extendedKeyUsage={usage}",
        )
        added = [word for each in extensions for word in ("-addext", each)]
        run(["openssl", *how.split(), "-keyout", str(key), "-out", str(certificate), "-days", str(_DAYS), *added])
        return Certificate(certificate.read_text(), key.read_text())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
