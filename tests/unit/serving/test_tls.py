from __future__ import annotations

import ssl

from serving.tls import certificates


def test_servers_are_verified_with_certificates_loaded_once() -> None:
    context = certificates()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.cert_store_stats()["x509_ca"] > 0
    assert certificates() is context
