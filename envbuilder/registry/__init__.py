"""A client of OCI registries: references, credentials, blobs, manifests, referrers. Knows only ``oci``.

Follows the OCI distribution specification 1.1 (https://github.com/opencontainers/distribution-spec); docstrings name
its sections.
"""
