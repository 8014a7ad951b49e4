"""TLS certificates of a private authority, for servers and (mutual TLS) for clients."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from broker.files import write_private


@dataclass(frozen=True, slots=True)
class CertificatePair:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> str:
        """The certificate in PEM format."""
        text: str = self.certificate.public_bytes(serialization.Encoding.PEM).decode()
        return text

    def save(self, certificate: Path, key: Path) -> None:
        """Write the certificate and, readable by this user only, the key."""
        plain = serialization.NoEncryption()
        text = self.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        write_private(key, text.decode())
        certificate.write_text(self.pem)

    @classmethod
    def load(cls, certificate: Path, key: Path) -> CertificatePair:
        """Read a pair written by `save`; raises TypeError if the key is not an elliptic-curve key."""
        private = serialization.load_pem_private_key(key.read_bytes(), None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            msg = f"{key} is not an elliptic-curve private key"
            raise TypeError(msg)
        return cls(x509.load_pem_x509_certificate(certificate.read_bytes()), private)


def new_authority(days: float) -> CertificatePair:
    """Create a self-signed certificate authority, valid for `days` days."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("relax certificate authority")
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _builder(name, name, key, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return CertificatePair(builder.sign(key, hashes.SHA256()), key)


def issue(issuer: CertificatePair, name: str, days: float, hosts: tuple[str, ...] = ()) -> CertificatePair:
    """Issue a certificate for a server with these names and addresses, or without for a client."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_name(name), issuer.certificate.subject, key, days)
    use = (
        [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        if hosts
        else [ExtendedKeyUsageOID.CLIENT_AUTH]
    )
    builder = builder.add_extension(x509.ExtendedKeyUsage(use), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    known = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key())
    builder = builder.add_extension(known, critical=False)
    if hosts:
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return CertificatePair(builder.sign(issuer.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    # Backdated by 5 minutes because the clocks of machines differ.
    builder = builder.not_valid_before(now - dt.timedelta(minutes=5) + min(dt.timedelta(), dt.timedelta(days=days)))
    return builder.not_valid_after(now + dt.timedelta(days=days))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
