"""Resolve an environment into a lock: uv chooses the versions, the index's metadata gives files and the graph.

uv is run as a program on a project file made for the purpose, so that packages which come from a named index come
from nowhere else. Everything that enters the lock is a function of the specification and the index as of
``exclude-newer``: no earlier lock is asked for preferences.
"""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tomlkit
from packaging.pylock import Package as PylockPackage
from packaging.pylock import Pylock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envbuilder import parallel, report
from envbuilder.errors import InputError, NoError, UnreachableError
from envbuilder.lock.cuda import cuda_of
from envbuilder.lock.drift import lock_input, lock_target
from envbuilder.lock.metadata import LOOKUPS
from envbuilder.lock.model import Build, Lock, Package
from envbuilder.lock.target import best_wheel, supported_tags
from envbuilder.oci.digest import Digest
from envbuilder.run import ProgramFailedError, run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from packaging.tags import Tag

    from envbuilder.lock.indexconfig import Indexes
    from envbuilder.lock.metadata import MetadataSource
    from envbuilder.spec.environment import Environment


class ResolveError(InputError):
    """No set of versions satisfies the environment, or one has no file for the target."""


class CudaMismatchError(NoError):
    """The torch that was locked carries another CUDA than the environment promises."""


@dataclass(frozen=True)
class Resolver:
    """What resolving needs from outside: the indexes, a Python of the minor for uv, and metadata."""

    indexes: Indexes
    python: Path
    metadata: MetadataSource

    def resolve(self, environment: Environment, parent: Lock | None) -> Lock:
        """Return the lock of an environment; ``parent`` is the lock of what it extends.

        Raises:
            ResolveError: no versions fit, or a package has neither a wheel for the target nor a ``[build]`` table.
            CudaMismatchError: torch's CUDA is not the environment's; the hint says which torch carries it.
            UnreachableError: the index could not be asked.

        """
        target = lock_target(environment)
        report.step(f"resolving {environment.name} as of {environment.exclude_newer:%Y-%m-%d}")
        chosen = self._choose(environment, parent, supported_tags(target))
        inherited = parent.by_name if parent is not None else {}

        def complete(package: Package) -> Package:
            known = inherited.get(package.name)
            if known is not None and known.digest == package.digest:
                return known
            metadata = self.metadata.of(package)
            return Package(
                package.name, package.version, package.file, package.digest, package.size,
                metadata.requires, metadata.requires_python, package.index, package.build,
            )  # fmt: skip

        packages = tuple(parallel.run_all(complete, chosen, workers=LOOKUPS))
        lock = Lock(environment.name, lock_input(environment), target, environment.cuda, packages)
        self._check_parent(lock, parent)
        self._check_cuda(lock)
        return lock

    def _choose(self, environment: Environment, parent: Lock | None, tags: Sequence[Tag]) -> list[Package]:
        """Return name, version and file of every package, sorted by name."""
        builds = {build.package: build for build in environment.builds}
        inherited = parent.by_name if parent is not None else {}
        indexes = {package: index.name for index in environment.indexes for package in index.packages}
        chosen = []
        for found in self._compile(environment, parent).packages:
            known = inherited.get(found.name)
            build = Build(tuple(sorted(builds[found.name].env.items()))) if found.name in builds else None
            if known is not None and known.version == str(found.version):
                chosen.append(known)
            else:
                chosen.append(_file_of(environment, found, tags, build, indexes.get(found.name)))
        return sorted(chosen, key=lambda package: package.name)

    def _compile(self, environment: Environment, parent: Lock | None) -> Pylock:
        sources = [*environment.builds]
        inherited = [package for package in parent.packages if package.build] if parent is not None else []
        env = dict(os.environ)
        for build in sources:
            env |= build.env
        for package in inherited:
            env |= dict(package.build.env) if package.build else {}
        by_source = sorted({*(build.package for build in sources), *(package.name for package in inherited)})
        with tempfile.TemporaryDirectory(prefix="envbuilder-") as folder:
            project, out = Path(folder) / "pyproject.toml", Path(folder) / "pylock.toml"
            project.write_text(self._project(environment, parent), encoding="utf-8")
            constraints = Path(folder) / "constraints.txt"
            constraints.write_text("\n".join(environment.constraints), encoding="utf-8")
            words = [
                "uv", "pip", "compile", str(project), "--output-file", str(out), "--format", "pylock.toml",
                "--python", str(self.python), "--python-version", environment.python,
                "--python-platform", f"x86_64-manylinux_{environment.glibc.replace('.', '_')}",
                "--exclude-newer", environment.exclude_newer.isoformat(),
                "--default-index", self.indexes.default.url, "--no-config", "--quiet", "--no-header",
                "--constraints", str(constraints), "--only-binary", ":all:", *(word for name in by_source for word in ("--no-binary", name)),
            ]  # fmt: skip
            try:
                run(words, env=env)
            except ProgramFailedError as error:
                raise _explain(environment, error) from error
            return Pylock.from_dict(tomllib.loads(out.read_text(encoding="utf-8")))

    def _project(self, environment: Environment, parent: Lock | None) -> str:
        """Return the project file that uv resolves."""
        inherited = [f"{package.name}=={package.version}" for package in parent.packages] if parent else []
        document = tomlkit.document()
        document["project"] = {
            "name": f"environment-{environment.name}",
            "version": "0",
            "requires-python": f"=={environment.python}.*",
            "dependencies": [*environment.wanted(), *inherited],
        }
        sources = {package: {"index": index.name} for index in environment.indexes for package in index.packages}
        indexes = [
            {"name": index.name, "url": self.indexes.of(index.name).url, "explicit": True}
            for index in environment.indexes
        ]
        uv = {"sources": sources, "index": indexes}
        document["tool"] = {"uv": {key: value for key, value in uv.items() if value}}
        return tomlkit.dumps(document)

    def _check_parent(self, lock: Lock, parent: Lock | None) -> None:
        for package in parent.packages if parent is not None else ():
            if lock.by_name.get(package.name) != package:
                raise ResolveError(
                    f"{lock.environment} does not keep {package.name} {package.version} of {lock.input.extends}",
                    hint=f"lock {lock.input.extends} anew first, or loosen what asks for another version",
                )

    def _check_cuda(self, lock: Lock) -> None:
        torch = lock.by_name.get("torch")
        if torch is None:
            return
        carried = cuda_of(torch.version, torch.requires)
        if carried == lock.cuda:
            return
        raise CudaMismatchError(
            f"{lock.environment}: torch {torch.version} carries CUDA {carried or 'none (a CPU build)'}, "
            f"but the environment says {lock.cuda}",
            hint=_who_carries(lock.cuda, self.metadata.torches(torch.index, lock.target)),
        )


def _who_carries(cuda: str, torches: Mapping[str, tuple[str, ...]]) -> str:
    """Say which of an index's torch versions carry a CUDA, or else what each carries."""
    carried = {version: cuda_of(version, requires) for version, requires in torches.items()}
    fitting = [version for version, other in carried.items() if other == cuda]
    if fitting:
        return f"on this index CUDA {cuda} is carried by torch {', '.join(fitting)}"
    listing = ", ".join(f"{version} ({other or 'cpu'})" for version, other in carried.items())
    return f"no torch on this index carries CUDA {cuda}; it has {listing}"


def _file_of(
    environment: Environment, found: PylockPackage, tags: Sequence[Tag], build: Build | None, index: str | None
) -> Package:
    """Return the package with the file that the target takes."""
    name, version = canonicalize_name(found.name), str(found.version)
    wheels = {Path(wheel.filename).name: wheel for wheel in found.wheels or ()}
    file = best_wheel(wheels, tags) if build is None else None
    if file is not None:
        hashes, size = wheels[file].hashes, wheels[file].size
    elif build is not None and found.sdist is not None:
        file, hashes, size = found.sdist.filename, found.sdist.hashes, found.sdist.size
    else:
        raise ResolveError(
            f"{environment.file}: {name} {version} has no wheel for Python {environment.python} on glibc "
            f"{environment.glibc}" + ("" if build is None else ", and no source archive to build it from"),
            hint=f"choose another version, or add a table [build.{name}] if it builds from source",
        )
    if "sha256" not in hashes or size is None:
        raise ResolveError(
            f"the index states no {'sha256' if 'sha256' not in hashes else 'size'} for {file}",
            hint="a lock needs both for every file; use an index that states them",
        )
    return Package(name, version, file, Digest(hashes["sha256"]), size, (), None, index, build)


def _explain(environment: Environment, error: ProgramFailedError) -> InputError | UnreachableError:
    """Turn uv's failure into ours: out of reach, or no solution, with the place of the requirement it names."""
    text = error.stderr.strip()
    if "error sending request" in text or "Failed to fetch" in text or "client error" in text:
        return UnreachableError(f"the package index could not be asked:\n{text}", hint="check the index and try again")
    for number, requirement in enumerate(environment.requires):
        if re.search(rf"(?<![\w.-]){re.escape(canonicalize_name(Requirement(requirement).name))}(?![\w-])", text):
            return ResolveError(f"{environment.file}: packages.requires[{number}]: `{requirement}`:\n{text}")
    return ResolveError(f"{environment.file}: packages: cannot be resolved:\n{text}")
