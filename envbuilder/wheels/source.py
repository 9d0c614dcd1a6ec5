"""Build a wheel from a locked source archive, so that the same machine gives the same bytes again.

The build is isolated (uv makes its environment, of the index as it was at the lock's ``exclude-newer``), sees no
variables but those named here and in the environment's ``[build]`` table, and runs in a folder whose path depends on
what is built alone. What still differs from build to build (dates, order, modes, compression) is written anew. So a
wheel of pure Python has the same digest on every machine, a compiled one on machines with the same compiler.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from envbuilder import report
from envbuilder.atomic import atomic_file, remove_tree
from envbuilder.errors import EnvbuilderError, HostError
from envbuilder.http import OutOfReachError
from envbuilder.oci.digest import Digest
from envbuilder.run import ProgramFailedError, run
from envbuilder.store.store import NotInStoreError
from envbuilder.wheels.built import BuiltWheel, Tools, build_key, recall, remember
from envbuilder.wheels.repack import repack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from envbuilder.lock.indexconfig import Indexes
    from envbuilder.lock.model import Package
    from envbuilder.store.store import Store

#: 1980-01-01, the earliest time that a ZIP can hold.
_EPOCH = "315532800"
_LOG_LINES = 15
#: What a build may see of the user's environment: where programs, certificates, proxies and uv's cache are.
_PASSED = re.compile(
    r"PATH|HOME|USER|NETRC|XDG_\w+|TMPDIR|CC|CXX|\w+_proxy|\w+_PROXY|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    r"|UV_(CACHE_DIR|CONFIG_FILE|INDEX_\w+_(USERNAME|PASSWORD)|INSECURE_HOST|KEYRING_PROVIDER|NATIVE_TLS|SYSTEM_CERTS"
    r"|HTTP_TIMEOUT|HTTP_RETRIES|OFFLINE|LINK_MODE|CREDENTIALS_DIR)"
)
_UNREACHABLE = re.compile(
    r"error sending request|Request failed after|Failed to fetch|Could not connect|network is disabled"
)


class BuildFailedError(HostError):
    """A source archive did not build here. ``log`` is the file with all that the build printed."""

    def __init__(self, file: str, tail: str, log: Path, needs: Sequence[str]) -> None:
        hint = f"the build needs {_enumerated(needs)}; " if needs else ""
        super().__init__(f"{file} does not build on this host:\n{tail}", hint=f"{hint}the whole log: {log}")
        self.log = log


class WrongArchiveError(EnvbuilderError):
    """A source archive is damaged, or is none that can be unpacked safely."""


class WrongWheelError(EnvbuilderError):
    """A build made something else than one wheel of the package."""


@dataclass(frozen=True)
class Builder:
    """What every build of a lock has in common.

    ``python`` is an interpreter of the lock's minor, the default one of ``indexes`` is where build requirements come
    from, ``exclude_newer`` the lock's moment (RFC 3339), ``tools`` what
    ``find_tools`` says of this machine.
    """

    store: Store
    python: Path
    indexes: Indexes
    exclude_newer: str
    tools: Tools

    def build(self, package: Package, needs: Sequence[str] = ()) -> BuiltWheel:
        """Build the wheel of a package whose source archive is in the store, unless that was done before.

        ``needs`` are the environment's words for what the build needs of the host; they only enter an error.

        Raises:
            NotInStoreError, WrongArchiveError: the archive is not there, or is damaged.
            BuildFailedError: it does not build; names the last lines, the log and ``needs``.
            OutOfReachError: the index of the build requirements did not answer.
            WrongWheelError: something else came out than one wheel of this name and version.

        """
        key = build_key(package, self.exclude_newer, self.tools)
        with self.store.lock(f"build-{key[:16]}"):
            return recall(self.store, key) or self._build(package, key, needs)

    def _build(self, package: Package, key: str, needs: Sequence[str]) -> BuiltWheel:
        archive = self.store.blob(package.digest)
        if not archive.exists():
            raise NotInStoreError(f"{package.file} is not in the store")
        report.step(f"building {package.file}")
        with _workshop(key) as folder:
            wheel = self._run(package, archive, folder, needs)
            _check(wheel, package)
            canonical = self.store.temporary_name()
            try:
                repack(wheel, canonical)
                built = BuiltWheel(wheel.name, Digest.of_file(canonical), canonical.stat().st_size)
                self.store.adopt(canonical, built.digest)
            finally:
                canonical.unlink(missing_ok=True)
        remember(self.store, key, built)
        return built

    def _run(self, package: Package, archive: Path, folder: Path, needs: Sequence[str]) -> Path:
        """Unpack and build; return the only wheel that came out."""
        source, out = folder / "source", folder / "out"
        source.mkdir(parents=True)
        _unpack(archive, package, source)
        inner = [path for path in source.iterdir() if path.is_dir()]
        root = inner[0] if len(inner) == 1 else source
        words: list[str | Path] = [
            "uv", "build", "--wheel", "--no-progress", "--python", self.python, "--exclude-newer", self.exclude_newer,
            "--out-dir", out, root,
        ]  # fmt: skip
        try:
            done = run(words, cwd=folder, env=self._environment(package, folder))
        except ProgramFailedError as error:
            raise self._explained(error, package, needs) from error
        report.detail(done.stderr)
        wheels = sorted(out.glob("*.whl"))
        if len(wheels) != 1:
            raise WrongWheelError(f"{package.file}: its build made {len(wheels)} wheels instead of one")
        return wheels[0]

    def _environment(self, package: Package, folder: Path) -> dict[str, str]:
        """Return the variables that the build sees. Those of the lock come last, but compiler flags add up."""
        passed = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
        ours = {
            "SOURCE_DATE_EPOCH": _EPOCH, "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC",
            "UV_DEFAULT_INDEX": self.indexes.default.url, "UV_PYTHON_DOWNLOADS": "never",
        }  # fmt: skip
        theirs = dict(package.build.env) if package.build is not None else {}
        flags = f"-g0 -ffile-prefix-map={folder}=."
        for name in ("CFLAGS", "CXXFLAGS"):
            theirs[name] = f"{flags} {theirs.get(name, '')}".strip()
        return {**passed, **ours, **theirs}

    def _explained(self, error: ProgramFailedError, package: Package, needs: Sequence[str]) -> EnvbuilderError:
        log = self.store.root / "logs" / f"build-{package.name}-{package.version}.log"
        text = error.stdout + error.stderr
        with atomic_file(log) as file:
            file.write(text.encode())
        if _UNREACHABLE.search(text):
            return OutOfReachError(
                self.indexes.default.url, f"what the build of {package.file} needs could not be fetched"
            )
        # uv's own closing hint is of no use beside ours.
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("hint:")]
        tail = "\n".join(lines[-_LOG_LINES:])
        return BuildFailedError(package.file, tail, log, needs)


@contextmanager
def _workshop(key: str) -> Iterator[Path]:
    """Give a folder for one build: the same path for the same build, because compilers write it into what they make.

    It does not lie in the store, whose path may have spaces: compiler flags and makefiles cannot carry those.
    """
    home = Path(tempfile.gettempdir()) / f"envbuilder-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    # Anyone may make folders there: one that is not ours alone could change what we build.
    status = home.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise HostError(f"{home} is not a folder of this user alone", hint="remove it, or set TMPDIR to another folder")
    folder = home / key[:16]
    with FileLock(home / f"{key[:16]}.lock"):
        remove_tree(folder)
        folder.mkdir()
        try:
            yield folder
        finally:
            remove_tree(folder)


def _unpack(archive: Path, package: Package, folder: Path) -> None:
    """Unpack a source archive after verifying its digest; nothing lands outside ``folder``."""
    if (actual := Digest.of_file(archive)) != package.digest:
        raise WrongArchiveError(f"{package.file} in the store is damaged: it has {actual}, not {package.digest}")
    try:
        if package.file.endswith(".zip"):
            shutil.unpack_archive(archive, folder, "zip")
        else:
            # tar refuses names that leave the folder, and makes symbolic links last.
            run(["tar", "-xf", archive, "--no-same-owner", "--no-same-permissions", "-C", folder])
    except (ProgramFailedError, shutil.ReadError) as error:
        raise WrongArchiveError(f"{package.file} does not unpack: {error}") from error


def _check(wheel: Path, package: Package) -> None:
    try:
        name, version, _, _ = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        raise WrongWheelError(f"{package.file}: its build made `{wheel.name}`, which is no wheel's name") from error
    if name != canonicalize_name(package.name) or version != Version(package.version):
        raise WrongWheelError(
            f"{package.file}: its build made {wheel.name} instead of a wheel of {package.name} {package.version}"
        )


def _enumerated(needs: Sequence[str]) -> str:
    return needs[0] if len(needs) == 1 else f"{', '.join(needs[:-1])} and {needs[-1]}"
