"""A TLS certificate for one ticket. No authority vouches for it: its fingerprint stands in the ticket."""

import base64
import hashlib
import ssl
import subprocess
import tempfile
from pathlib import Path

_COMMAND = [
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
    *("-days", "2", "-subj", "/CN=rank cells"),
]


class CertificateError(RuntimeError):
    """No certificate could be made; the message says what is missing."""


def make_server_context() -> tuple[ssl.SSLContext, str]:
    """TLS 1.3 with a fresh key, and the fingerprint of its certificate. The key is on disk for this moment only."""
    with tempfile.TemporaryDirectory(prefix="scratch-ddp-key-") as folder:  # readable by this user only
        key, certificate = Path(folder) / "key", Path(folder) / "certificate"
        try:
            command = [*_COMMAND, "-keyout", str(key), "-out", str(certificate)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
        except FileNotFoundError:
            raise CertificateError(
                "hosts join over TLS, and its certificate is made by the command `openssl`, which this machine lacks. "
                "Install it (Debian and Ubuntu: apt-get install openssl)"
            ) from None
        except subprocess.CalledProcessError as error:
            raise CertificateError(f"`openssl req` made no certificate: {error.stderr.strip()}") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(certificate, key)
        return context, fingerprint(ssl.PEM_cert_to_DER_cert(certificate.read_text()))


def make_client_context() -> ssl.SSLContext:
    """TLS 1.3 that accepts any certificate: the caller compares its `fingerprint` with the ticket's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a certificate in DER form, as 43 characters."""
    return base64.urlsafe_b64encode(hashlib.sha256(certificate).digest()).decode().rstrip("=")
