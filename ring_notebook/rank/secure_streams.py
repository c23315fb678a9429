"""Encrypted streams between hosts: TLS 1.3, whose two ends know each other's certificate.

An `Identity` is a private key and a certificate that nobody else has signed. A certificate is no secret. Where a
channel that both ends trust carries it, each has an identity of its own (`Identity.new`). Where both ends share a
secret, they make the same identity from it (`Identity.of_secret`). OpenSSL does the rest: it refuses a peer without the
private key of a known certificate in the handshake, and recorded traffic can be neither read nor replayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import hmac
import os
import socket
import ssl
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass

_BEGIN, _END = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)  # the clocks of hosts may differ
_RECORD = struct.Struct("!BHH")  # what a record of TLS begins with: kind, version, length
_CAPACITY = 1 << 16


@dataclass(frozen=True, slots=True)
class Identity:
    """A private key and its ``certificate``, both in the text format PEM."""

    certificate: str
    _key: str

    @classmethod
    def new(cls) -> Identity:
        """One that no other process has."""
        return cls.of_secret(os.urandom(32))

    @classmethod
    def of_secret(cls, secret: bytes) -> Identity:
        """The identity of all processes that know ``secret``."""
        # Only jobs over several hosts need these, which take 0.1 s to import.
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, b"ring-notebook identity", "sha256"))
        public = key.public_key().public_bytes(form.Encoding.Raw, form.PublicFormat.Raw)
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, public.hex())])
        # Ed25519 signs without random numbers: the same secret gives the same certificate, byte for byte.
        builder = x509.CertificateBuilder(name, name, key.public_key(), 1, _BEGIN, _END)
        certificate = builder.sign(key, None).public_bytes(form.Encoding.PEM).decode()
        private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
        return cls(certificate, private.decode())


_making = threading.Lock()
_own_identity = functools.cache(Identity.new)


def own_identity() -> Identity:
    with _making:
        return _own_identity()


def tls_context(own: Identity, known: Iterable[str], *, server: bool) -> ssl.SSLContext:
    """TLS for a process with the identity ``own``, which accepts only peers with one of the ``known`` certificates.

    `know` adds others.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the key says who it is, not a name
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if server:
        context.num_tickets = 0  # nothing is resumed
    # OpenSSL reads files only. A pipe is one that no other process can open, and that is on no disk.
    pipes = [_pipe_with(text) for text in (own.certificate, own._key)]
    try:
        context.load_cert_chain(*(f"/dev/fd/{pipe}" for pipe in pipes))
    finally:
        for pipe in pipes:
            os.close(pipe)
    for certificate in known:
        know(context, certificate)
    return context


def tls_of_secret(secret: bytes, *, server: bool) -> ssl.SSLContext:
    """TLS between processes that know ``secret``."""
    own = Identity.of_secret(secret)
    return tls_context(own, [own.certificate], server=server)


def know(context: ssl.SSLContext, certificate: str) -> None:
    """Accept peers with ``certificate`` too. Raises ValueError if it is no certificate."""
    try:
        context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"expected a certificate, got {certificate!r:.60}: {error}") from None


def _pipe_with(text: str) -> int:
    """A pipe from which ``text``, which is shorter than its buffer, can be read."""
    source, sink = os.pipe()
    with os.fdopen(sink, "w") as file:
        file.write(text)
    return source


class Tls:
    """One end of TLS over whatever carries bytes: all methods return what to send. One thread at a time calls them."""

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._waiting = b""  # to be sent as soon as the other end is known
        self.known = False
        """Whether the other end has proven who it is."""
        self.ended = False
        """Whether the other end has ended its side."""

    def begin(self) -> bytes:
        return self._advance()

    def seal(self, data: bytes) -> bytes:
        """Send ``data``, encrypted; nothing before the other end is known."""
        if not self.known:
            self._waiting += data
            return b""
        if data:
            self._tls.write(data)
        return self._outgoing.read()

    def open(self, sealed: bytes) -> tuple[bytes, bytes]:
        """What has come in ``sealed``, and what to send back. Raises ssl.SSLError where the other end is unknown."""
        self._incoming.write(sealed)
        back = self._advance()
        data = b""
        if self.known:
            try:
                while piece := self._tls.read(_CAPACITY):
                    data += piece
                self.ended = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:  # what `read` says of it once `end` was called
                self.ended = True
        return data, back + self._outgoing.read()

    def end(self) -> bytes:
        """End this side. The other end has sent everything once it has `ended`."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.unwrap()
        return self._outgoing.read()

    def _advance(self) -> bytes:
        if not self.known:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                return self._outgoing.read()
            self.known = True
            waiting, self._waiting = self._waiting, b""
            return self._outgoing.read() + self.seal(waiting)
        return b""


class ProvingChannel:
    """TLS over a socket until both ends have proven who they are; after `leave` the socket carries what it is given.

    All methods raise OSError and EOFError where the other end is not known.
    """

    def __init__(self, channel: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        self._channel = channel
        self._tls = Tls(context, server=server)
        self._heard = b""

    async def meet(self) -> None:
        """Return when the other end is known."""
        await self._send(self._tls.begin())
        while not self._tls.known:
            await self._receive()

    async def say(self, data: bytes) -> None:
        await self._send(self._tls.seal(data))

    async def hear(self, size: int) -> bytes:
        """The next bytes, so many."""
        while len(self._heard) < size:
            await self._receive()
        data, self._heard = self._heard[:size], self._heard[size:]
        return data

    async def leave(self) -> None:
        """End TLS. Both ends call this, and one after the other reads no byte that follows."""
        await self._send(self._tls.end())
        while not self._tls.ended:
            await self._receive()

    async def _send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._channel, data)

    async def _receive(self) -> None:
        """Take the next record, and no byte after it."""
        head = await self._read(_RECORD.size)
        data, back = self._tls.open(head + await self._read(_RECORD.unpack(head)[2]))
        self._heard += data
        await self._send(back)

    async def _read(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < size:
            piece = await loop.sock_recv(self._channel, size - len(data))
            if not piece:
                raise EOFError("it has closed the connection")
            data += piece
        return data
