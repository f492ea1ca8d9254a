"""Certificates of the stream."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

__all__ = ["self_signed", "server_credentials"]


def server_credentials(certificate: bytes, key: bytes) -> grpc.ServerCredentials:
    """Credentials of a server from its certificate chain and private key, both PEM."""
    return grpc.ssl_server_credentials([(key, certificate)])


def self_signed(hosts: Sequence[str], days: float = 7.0) -> tuple[bytes, bytes]:
    """A short-lived certificate for these host names or addresses, and its key, both PEM.

    Sites are given the certificate as ``root_certificate``; the key stays in the
    memory of the server's process.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "flower-geo split server")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # clocks of two institutions differ
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([_named(host) for host in hosts]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.PEM), private


def _named(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
