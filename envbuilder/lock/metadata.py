"""The core metadata of what was chosen: from the index, or from a wheel built of a source archive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.utils import parse_wheel_filename
from packaging.version import Version

from envbuilder import parallel, report
from envbuilder.errors import InputError
from envbuilder.lock.coremetadata import CoreMetadata, core_metadata
from envbuilder.lock.target import best_wheel, supported_tags

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from envbuilder.lock.index import IndexFile
    from envbuilder.lock.indexconfig import Indexes
    from envbuilder.lock.model import Package, Target

#: How many requests for metadata are under way at once.
LOOKUPS = 16


@dataclass(frozen=True)
class MetadataSource:
    """Reads metadata through ``indexes``; ``build`` returns the METADATA of a package that is built from source."""

    indexes: Indexes
    build: Callable[[Package], bytes]

    def of(self, package: Package) -> CoreMetadata:
        """Return the metadata of a package whose ``requires`` are not known yet.

        Raises:
            InputError: the index does not have the file, or the metadata is another package's.
            OutOfReachError: the index did not answer.

        """
        if package.build is not None:
            found = core_metadata(self.build(package))
        else:
            index = self.indexes.of(package.index)
            file = index.find(package.name, package.file)
            if file is None:
                raise InputError(f"{package.file} is not on the index {index}")
            found = core_metadata(index.metadata(file))
        if (found.name, Version(found.version)) != (package.name, Version(package.version)):
            raise InputError(f"{package.file} says that it is {found.name} {found.version}")
        for line in found.invalid:
            report.warning(f"{package.file}: its metadata has a line that is not valid and is left out: {line}")
        return found

    def torches(self, index: str | None, target: Target) -> Mapping[str, tuple[str, ...]]:
        """Return each torch version of an index that has a wheel for the target, newest first, with its Requires-Dist."""
        offered, tags = self.indexes.of(index), supported_tags(target)
        by_version: dict[Version, dict[str, IndexFile]] = {}
        for file in offered.files("torch"):
            if file.file.endswith(".whl") and not file.yanked:
                by_version.setdefault(parse_wheel_filename(file.file)[1], {})[file.file] = file
        fitting = [
            (version, files[best])
            for version, files in sorted(by_version.items(), reverse=True)
            if (best := best_wheel(files, tags)) is not None
        ]
        data = parallel.run_all(lambda pair: offered.metadata(pair[1]), fitting, workers=LOOKUPS)
        return {
            str(version): core_metadata(text).requires for (version, _), text in zip(fitting, data, strict=True)
        }  # fmt: skip
