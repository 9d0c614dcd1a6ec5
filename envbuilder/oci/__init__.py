"""OCI images: digests, descriptors, layers, layouts. Knows nothing of Python packaging.

Follows the OCI image specification 1.1 (https://github.com/opencontainers/image-spec).
"""
