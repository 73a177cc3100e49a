"""A daemon's key and certificate, and how TLS uses those of others.

Nobody signs them: a daemon is who has the key of the certificate whose fingerprint another daemon's operator entered.
A certificate never expires, so that no clock and no forgotten date separates nodes; it is revoked by removing the peer.
"""

from __future__ import annotations

import hashlib
import secrets
import ssl
import stat
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from xmigd.errors import StartError
from xmigd.peers.files import write_privately

FILE = "peer-identity.pem"  # key and certificate in one: there is never one without the other
BEGIN, END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
LONGEST = 4096  # bytes of a certificate as text: one of RSA with 4,096 bits has half as many
LABEL = 60  # characters of a part of a server name; at most 63
SUFFIX = "peer.xmig"

claims: ContextVar[list[str] | None] = ContextVar("claims", default=None)


@dataclass(frozen=True, slots=True)
class Identity:
    """This daemon's."""

    file: Path
    certificate: str  # PEM
    fingerprint: str


def open_identity(folder: Path) -> Identity:
    """The identity in this folder, made if there is none. Raises StartError."""
    path = folder / FILE
    try:
        if not path.exists():
            write_privately(path, _make())
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{path} cannot be read or made: {error}", hint="it is this daemon's key for peers") from None
    if mode & 0o077:
        raise StartError(f"others may read the key in {path} (mode {mode:04o})", hint=f"chmod 600 {path}")
    try:
        certificate = text[text.index(BEGIN) : text.index(END) + len(END)] + "\n"
        identity = Identity(path, certificate, fingerprint_of(certificate))
        client_context(identity, certificate)
    except (ValueError, OSError) as error:  # SSLError is an OSError
        raise StartError(
            f"{path} is no key with its certificate: {error}",
            hint="restore it, or remove it: a new one is made, whose fingerprint every peer has to be given",
        ) from None
    return identity


def fingerprint_of(certificate: str | bytes) -> str:
    """SHA-256 of a certificate, PEM or DER, in hexadecimal. Raises ValueError: it is no PEM."""
    der = ssl.PEM_cert_to_DER_cert(certificate) if isinstance(certificate, str) else certificate
    return hashlib.sha256(der).hexdigest()


class Trust:
    """TLS with all peers of a node. What it trusts is loaded once, and not for each connection: a certificate takes a
    fifth of a millisecond. Every thread may use the contexts."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.server, self.client = self.made_for(())

    def made_for(self, trusted: Iterable[str]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Contexts, of the server and of the client, for these certificates (PEM) and no others. Blocks: 0.4 s for a
        thousand."""
        known = list(trusted)
        return server_context(self.identity, known), client_context(self.identity, *known)

    def add(self, certificate: str) -> None:
        for context in (self.server, self.client):
            context.load_verify_locations(cadata=certificate)


def server_context(identity: Identity, trusted: Iterable[str]) -> ssl.SSLContext:
    """TLS 1.3, for who shows one of these certificates. Which name the client claims, before anything is verified, is
    appended to `claims`, if there is a list in the connection's context."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # a session that is resumed would show no certificate
    for certificate in trusted:
        context.load_verify_locations(cadata=certificate)

    def named(_: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> None:
        if (claimed := claims.get()) is not None:
            claimed.append(read_server_name(name or ""))

    context.sni_callback = named
    return context


def client_context(identity: Identity, *trusted: str, anybody: bool = False) -> ssl.SSLContext:
    """TLS 1.3, with who shows one of these certificates, or with anybody. The fingerprint is to be compared before
    anything is sent; TLS has verified that they have the key."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, identity)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE if anybody else ssl.CERT_REQUIRED
    for certificate in trusted:
        context.load_verify_locations(cadata=certificate)
    return context


def server_name(node: str) -> str:
    """What a client that is called so sends as the server's name, so that a refusal can name it. Names of nodes are not
    always names of hosts, so it is in hexadecimal."""
    text = node.encode().hex()
    return ".".join([*(text[at : at + LABEL] for at in range(0, len(text), LABEL)), SUFFIX])


def read_server_name(name: str) -> str:
    """The inverse. Empty: it is no such name."""
    digits, _, suffix = name.rpartition("." + SUFFIX)
    try:
        return "" if suffix else bytes.fromhex(digits.replace(".", "")).decode("ascii")
    except ValueError:
        return ""


def _context(protocol: ssl._SSLMethod, identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(identity.file)
    return context


def _make() -> bytes:
    # Loaded here: it takes a tenth of a second, once in a daemon's life.
    from datetime import UTC, datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    # Each its own: of several trusted certificates with one name OpenSSL may compare with the wrong one.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"xMIG node {secrets.token_hex(8)}")])
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign", "crl_sign",
         "encipher_only", "decipher_only"), False,
    )  # fmt: skip
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC))  # RFC 5280: it does not expire
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, **usage), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)
