"""What a layer of wheels is a function of. Asked by every build, so it imports little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuilder.oci.blob import Compression
from envbuilder.oci.layer import revision
from envbuilder.oci.model import canonical_json
from envbuilder.wheels import bytecode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from envbuilder.oci.digest import Digest

#: Enters layer keys: whatever changes the bytes must change this.
REVISION = "wheels 4"


@dataclass(frozen=True)
class WheelFile:
    """A wheel: its file name, its digest, and where its bytes lie."""

    name: str
    digest: Digest
    path: Path


@dataclass(frozen=True)
class InstallPrefix:
    """Where wheels are installed in the image: ``root`` (``/opt/env``) and the Python minor (``3.12``)."""

    root: str
    python: str

    @property
    def site_packages(self) -> str:
        """The one folder for pure and platform packages."""
        return f"{self.root}/lib/python{self.python}/site-packages"

    @property
    def interpreter(self) -> str:
        """The interpreter that scripts name in their first line."""
        return f"{self.root}/bin/python"

    def scheme(self, distribution: str) -> dict[str, str]:
        """Return the installation scheme, as a virtual environment has it, without the leading slash."""
        root = self.root.lstrip("/")
        site = self.site_packages.lstrip("/")
        headers = f"{root}/include/site/python{self.python}/{distribution}"
        return {"purelib": site, "platlib": site, "headers": headers, "scripts": f"{root}/bin", "data": root}


def layer_key(
    wheels: Sequence[WheelFile],
    prefix: InstallPrefix,
    compiler_version: str,
    compression: Compression = Compression.GZIP,
) -> str:
    """Return the key of the layer that ``write_wheels`` makes: equal keys, equal bytes."""
    return canonical_json(
        {
            "wheels": [[wheel.name, str(wheel.digest)] for wheel in wheels],
            "prefix": [prefix.root, prefix.python],
            "compiler": compiler_version,
            "revisions": [REVISION, bytecode.REVISION, revision(compression)],
        }
    ).decode()
