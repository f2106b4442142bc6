"""Certificates for servers on loopback, made for one test or one measurement."""

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def certificate_for(address: str, folder: Path) -> Path:
    """A self-signed certificate for an address, which is its own CA, with its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "loopback")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=24))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / f"{address}.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


def presenting(certificate: Path) -> ssl.SSLContext:
    """The context of a server with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def bundle_with(certificate: Path) -> Path:
    """A CA bundle of the size of the usual ones, botocore's own, with this certificate."""
    from botocore.httpsession import get_cert_path

    path = certificate.with_suffix(".bundle.pem")
    usual = Path(get_cert_path(True)).read_bytes()
    path.write_bytes(usual + b"\n" + _certificate_in(certificate))
    return path


def _certificate_in(path: Path) -> bytes:
    whole = path.read_bytes()
    return whole[whole.index(b"-----BEGIN CERTIFICATE-----") :]
