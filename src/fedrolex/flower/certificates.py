"""Keys of nodes, and certificates for TLS on this machine."""

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PLAIN = serialization.NoEncryption()


def make_key(path: Path) -> None:
    """A node's key pair, as ``ssh-keygen -t ecdsa -b 384`` makes it."""
    private = ec.generate_private_key(ec.SECP384R1())
    secret = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, PLAIN)
    _write_secret(path, secret)
    public = private.public_key()
    path.with_name(f"{path.name}.pub").write_bytes(
        public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )


def certify(folder: Path) -> None:
    """A certificate authority of one's own (``ca.crt``), and a certificate for 127.0.0.1 (``server.pem``)."""
    now = datetime.now(UTC)
    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedrolex loopback authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])

    def certificate(name: x509.Name, public: ec.EllipticCurvePublicKey, *, ca: bool) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(public)
            .serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + timedelta(days=7))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )  # fmt: skip

    names: list[x509.GeneralName] = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    root = certificate(issuer, authority.public_key(), ca=True).sign(authority, hashes.SHA256())
    leaf = certificate(subject, own.public_key(), ca=False).add_extension(
        x509.SubjectAlternativeName(names), critical=False
    )
    signed = leaf.sign(authority, hashes.SHA256())
    (folder / "ca.crt").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    (folder / "server.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    secret = own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, PLAIN)
    _write_secret(folder / "server.key", secret)


def _write_secret(path: Path, secret: bytes) -> None:
    """A file that only its owner may read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
