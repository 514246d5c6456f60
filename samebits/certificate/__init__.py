"""Certificates: verdicts that outlive the process, kept on disk beside the environment they were found in.

A leaf: it knows no torch and nothing of samebits. The gate asks a :class:`CertificateStore`, ``samebits certificates``
looks into its folder. docs/certificates.md says what is stored and what voids it.
"""

from __future__ import annotations

from samebits.certificate.folder import Certificate, folder_in, inspect, name_of, remove
from samebits.certificate.record import StoredVerdict, Unbelievable, differences, digest
from samebits.certificate.store import CertificateStore

__all__ = [
    "Certificate",
    "CertificateStore",
    "StoredVerdict",
    "Unbelievable",
    "differences",
    "digest",
    "folder_in",
    "inspect",
    "name_of",
    "remove",
]
