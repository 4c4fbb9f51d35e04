"""DNS over TLS (RFC 7858): the certificate of a server block, and the encrypted stream of a connection."""

from __future__ import annotations

import socket
import ssl

from narthex.dns.corefile.settings import TlsServerSettings
from narthex.dns.server.dispatcher import ServerContext
from narthex.dns.server.tcp import Plaintext, TcpConnection, TcpServer

_READ = 65_536
_VERIFY = {"nocert": ssl.CERT_NONE, "verify_if_given": ssl.CERT_OPTIONAL, "require_and_verify": ssl.CERT_REQUIRED}


def server_tls_context(settings: TlsServerSettings, protocols: tuple[str, ...] = ()) -> ssl.SSLContext:
    """Return the TLS settings of a server. Raises OSError if a file cannot be read or has invalid content."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(settings.certificate, settings.key)
    context.verify_mode = _VERIFY[settings.client_auth]
    if settings.client_auth != "nocert":
        context.load_default_certs(ssl.Purpose.CLIENT_AUTH)
        if settings.authority:
            context.load_verify_locations(settings.authority)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


class TlsStream(Plaintext):
    """The server's end of one TLS session, without I/O."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._received, self._sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._received, self._sent, server_side=True)
        self._ready = False

    @property
    def protocol(self) -> str:
        """The protocol that client and server have agreed on (ALPN); empty without one."""
        return self._session.selected_alpn_protocol() or ""

    def receive(self, data: bytes) -> tuple[bytes, bytes]:
        """Return decrypted bytes, and bytes to send at once. Raises OSError."""
        if not data:
            return b"", b""
        self._received.write(data)
        said = bytearray()
        try:
            if not self._ready:
                self._session.do_handshake()
                self._ready = True
            while received := self._session.read(_READ):
                said += received
            self.ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.ended = True
        return bytes(said), self._sent.read()

    def send(self, data: bytes) -> bytes:
        """Return the encrypted bytes."""
        self._session.write(data)
        return self._sent.read()


class TlsServer(TcpServer):
    """Serves DNS over TLS at one listening socket."""

    def __init__(self, sock: socket.socket, context: ServerContext, max_bytes: int, tls: ssl.SSLContext) -> None:
        super().__init__(sock, context, max_bytes)
        self._tls = tls

    def connection(self, sock: socket.socket, address: str, port: int) -> TcpConnection:
        """Return the connection of a socket that was accepted."""
        return TcpConnection(self, sock, address, port, TlsStream(self._tls))
