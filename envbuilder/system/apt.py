"""Ask the host's own apt, in a private root: own lists, cache and state, an empty dpkg status, nobody's privileges.

The machine's proxies, credentials, keyrings and transports are honoured, since apt reads its configuration first and
ours after it. Of the machine's sources only those of one release of the distribution itself are used (see ``Apt``),
and neither its pins nor its hooks nor what is installed on it can have a say.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuilder import report
from envbuilder.atomic import DiskFullError, atomic_file
from envbuilder.errors import EnvbuilderError, HostError, InputError, UnreachableError, did_you_mean
from envbuilder.oci.digest import Digest
from envbuilder.run import ProgramFailedError, find, run
from envbuilder.system.sources import Source, archives, machine_sources, parse_stanzas

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

#: The archives' own names for themselves, in the Origin field of their signed Release files.
ORIGINS = {"Debian": "debian", "Ubuntu": "ubuntu"}
#: What belongs to a release, beside its own suite. Backports and proposed updates do not.
POCKETS = ("", "-updates", "-security")
#: Suites by which a source may call a release whose codename only its Release file tells.
_ALIASES = tuple(f"{name}{pocket}" for name in ("stable", "oldstable", "testing", "unstable") for pocket in POCKETS)
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
#: Lists younger than this are not refreshed (seconds), unless a package is gone from the mirror.
LISTS_AGE = 24 * 3600
_NO_APT = "Debian packages are resolved by the host's own apt; elsewhere, name a base image in the recipe (base.image)"
_GONE = re.compile(
    r"\b404\b|No such file|File not found|was not found|Unable to locate|Can't find a source|Hash Sum mismatch"
)
#: What apt ships for fetching any URI with its own transports, proxies and credentials. Not on PATH.
_HELPER = "/usr/lib/apt/apt-helper"
_FAILED = re.compile(r"^E: Failed to fetch \S+\s+(.+)$", re.MULTILINE)
_URI_LINE = re.compile(r"'(?P<uri>[^']+)' (?P<file>\S+) (?P<size>\d+) SHA256:(?P<sha256>[0-9a-f]{64})")
_WHERE_FIELDS = ("Filename", "SHA256")
_WHERE = re.compile(rf"^({'|'.join(_WHERE_FIELDS)}): (\S+)$", re.MULTILINE)
_FORMAT = "|".join(f"$({name})" for name in ("ORIGIN", "CODENAME", "REPO_URI", "RELEASE", "FILENAME"))

# Read after the machine's own configuration.
_CONFIGURATION = """\
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Invoke;
#clear DPkg::Post-Invoke;
#clear DPkg::Pre-Install-Pkgs;
#clear Acquire::IndexTargets;
#clear APT::Architectures;
Acquire::IndexTargets::deb::Packages {{
  MetaKey "$(COMPONENT)/binary-$(ARCHITECTURE)/Packages"; flatMetaKey "Packages"; ShortDescription "Packages";
  Description "$(RELEASE)/$(COMPONENT) $(ARCHITECTURE) Packages"; flatDescription "$(RELEASE) Packages"; Optional "0";
}};
Acquire::ForceHash "sha256";
Acquire::Languages "none";
Acquire::Retries "3";
APT::Architecture "{architecture}";
APT::Architectures {{ "{architecture}"; }};
APT::Default-Release "";
APT::Get::AllowUnauthenticated "false";
APT::Install-Recommends "false";
APT::Install-Suggests "false";
APT::Sandbox::User "root";
APT::Update::Error-Mode "any";
Dir::Cache "{root}/cache";
Dir::Cache::pkgcache "pkgcache.bin";
Dir::Cache::srcpkgcache "srcpkgcache.bin";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "{root}/empty";
Dir::Etc::SourceList "{root}/envbuilder.sources";
Dir::Etc::SourceParts "{root}/empty";
Dir::State "{root}/state";
Dir::State::Status "{root}/status";
"""


class StalePackageError(UnreachableError):
    """A resolved package is gone from the mirror, or is another one there: the plan is older than the archive."""

    def __init__(self, suite: str) -> None:
        super().__init__(
            f"the mirror of `{suite}` has no longer what was resolved",
            hint="it is being updated, or damaged: try again in a few minutes, or use another mirror",
        )


@dataclass(frozen=True)
class Host:
    """The machine whose apt is asked. ``etc`` is its ``/etc/apt``, ``os_release`` its release file."""

    etc: Path = Path("/etc/apt")
    os_release: Path = Path("/etc/os-release")

    def codename(self) -> str:
        """Return the release's codename; of a derivative, the one of the distribution it is made of.

        Raises:
            HostError: the machine is no Debian, no Ubuntu and none of their derivatives.

        """
        text = self.os_release.read_text(encoding="utf-8") if self.os_release.exists() else ""
        fields = dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)
        for name in ("UBUNTU_CODENAME", "DEBIAN_CODENAME", "VERSION_CODENAME"):
            if value := fields.get(name, "").strip("\"'"):
                return value
        raise HostError("this machine does not say which release of Debian or Ubuntu it is", hint=_NO_APT)


@dataclass(frozen=True)
class DebianPackage:
    """One package as apt found it: its SHA-256, its size in bytes, and its path below the root of its archive.

    ``file`` is what the archive's index calls Filename, ``pool/main/b/bash/bash_5.2.15-2_amd64.deb``. It names no host.
    """

    name: str
    version: str
    architecture: str
    file: str
    digest: Digest
    size: int


class Apt:
    """apt over a private root below ``root``, for one release.

    A machine's source counts when its suite belongs to the release (codename, -updates, -security) *and* its signed
    Release file says that it is the distribution: third parties use the same suite names.
    """

    def __init__(self, root: Path, suite: str, host: Host) -> None:
        find("apt-get", hint=_NO_APT)
        self.root = root.absolute()
        self.suite = suite
        self._host = host
        self._configuration = self.root / "apt.conf"

    def prepare(self, *, refresh: bool = False) -> str:
        """Make the root and have its lists younger than ``LISTS_AGE``; return the distribution, ``debian``.

        Raises:
            HostError: the machine's sources do not offer the release.
            UnreachableError: the mirror cannot be reached and there are no lists of before.

        """
        machine = machine_sources(self._host.etc)
        candidates = _candidates(machine, self.suite)
        if not candidates:
            raise self._not_offered(machine)
        stamp = self.root / "refreshed"
        echo = "\n".join(source.stanza() for source in candidates)
        # Other sources than those the lists were made from: start over.
        known = stamp.read_text(encoding="utf-8").partition("\n") if stamp.exists() else ("", "", "")
        if refresh or known[2] != echo or not _younger(stamp, LISTS_AGE):
            self._make_root()
            distribution = self._refresh(candidates, machine)
            _write(stamp, f"{distribution}\n{echo}")
            return distribution
        return known[0]

    def names(self) -> frozenset[str]:
        """Return the names of all packages that the release has, without those that are only provided."""
        return frozenset(self._run("apt-cache", "pkgnames").split())

    def listed(self, names: Iterable[str]) -> Mapping[Digest, str]:
        """Return the files that the lists have of some packages, in all versions: digest → path below the root."""
        try:
            output = self._run("apt-cache", "show", "--all-versions", *names)
        except ProgramFailedError as error:
            if "No packages found" in error.stderr:
                return {}
            raise
        blocks = (dict(_WHERE.findall(block)) for block in output.split("\n\n"))
        return {Digest(block["SHA256"]): block["Filename"] for block in blocks if len(block) == len(_WHERE_FIELDS)}

    def plan(self, names: Sequence[str]) -> tuple[DebianPackage, ...]:
        """Return all packages that installing ``names`` on an empty system needs, sorted by name.

        Recommended packages are left out. A name that is only provided works when exactly one package provides it.

        Raises:
            InputError: a name is unknown, or the packages cannot be installed together.

        """
        try:
            output = self._run("apt-get", "install", "-qq", "-y", "--print-uris", "--no-install-recommends", *names)
        except ProgramFailedError as error:
            raise self._unresolved(error) from error
        found = [match for match in map(_URI_LINE.match, output.splitlines()) if match]
        listed = self.listed(match["file"].partition("_")[0] for match in found)
        packages = [_package(match, listed) for match in found]
        return tuple(sorted(packages, key=lambda package: (package.name, package.architecture)))

    def download(self, packages: Iterable[DebianPackage], folder: Path) -> Mapping[str, Path]:
        """Fetch packages into ``folder`` and return their files by package name. apt verified hash and size.

        Raises:
            StalePackageError: the mirror has one of them no longer.
            UnreachableError: the mirror cannot be reached.

        """
        folder.mkdir(parents=True, exist_ok=True)
        words = [f"{p.name}:{p.architecture}={p.version}" for p in packages]
        try:
            self._run("apt-get", "download", "-qq", *words, cwd=folder)
        except ProgramFailedError as error:
            if _GONE.search(error.stderr):
                raise StalePackageError(self.suite) from error
            raise _unreachable(f"packages of `{self.suite}` could not be fetched", error) from error
        return {path.name.partition("_")[0]: path for path in folder.glob("*.deb")}

    def roots(self) -> tuple[str, ...]:
        """Return the URIs of the release's archives, each once, with no slash at the end; ``prepare`` comes before."""
        text = (self.root / "envbuilder.sources").read_text(encoding="utf-8")
        return tuple(dict.fromkeys(uri.rstrip("/") for source in parse_stanzas(text) for uri in archives(source)))

    def fetch(self, targets: Mapping[str, Path]) -> bool:
        """Fetch URIs to files that do not exist; return whether what failed to come, if anything, is not there.

        What comes is not verified in any way. False means that it could not be told: no answer, or a strange one.
        """
        try:
            self._run(_HELPER, "download-file", *(word for uri, to in targets.items() for word in (uri, str(to), "")))
        except ProgramFailedError as error:
            reasons = _FAILED.findall(error.stderr)
            return bool(reasons) and all(_GONE.search(reason) for reason in reasons)
        return True

    # -- the root ---------------------------------------------------------------------------------------------

    def _make_root(self) -> None:
        for name in ("state/lists/partial", "cache/archives/partial", "empty"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        _write(self.root / "status", "")
        _write(self._configuration, _configuration(self.root))

    def _refresh(self, candidates: Sequence[Source], machine: Sequence[Source]) -> str:
        """Fetch the lists of all candidates, keep those that are the distribution, and return its name."""
        report.step(f"Refreshing the package lists of {self.suite}")
        self._use(candidates)
        failure: ProgramFailedError | None = None
        try:
            self._run("apt-get", "update", "-q")
        except ProgramFailedError as error:
            failure = error  # another party's source may have failed: what counts is what is there now
        fetched = self._fetched()
        kept = [source for source in candidates if self._belongs(fetched.get(_key(source)))]
        if all(source.suite.endswith(POCKETS[1:]) for source in kept):
            if failure or any(_key(source) not in fetched for source in candidates):
                raise _unreachable(f"the package lists of `{self.suite}` could not be fetched", failure)
            raise self._not_offered(machine)
        for source in candidates:
            if _key(source) not in fetched and _same_keys(source, kept):
                message = f"the package lists of `{source.suite}` could not be fetched from {source.uri}"
                raise _unreachable(message, failure)
        if failure:
            report.warning(f"not every package list of {self.suite} could be refreshed; what is there is used")
        self._use(kept)
        return next(ORIGINS[fetched[_key(source)][0]] for source in kept)

    def _fetched(self) -> Mapping[tuple[str, str], tuple[str, str]]:
        """Return what the Release files say, (origin, codename), by (URI, suite) of the sources whose lists are here."""
        found = {}
        for line in self._run("apt-get", "indextargets", "--format", _FORMAT).splitlines():
            origin, codename, uri, release, file = line.split("|", 4)
            if Path(file).exists():
                found[uri.rstrip("/"), release] = (origin, codename)
        return found

    def _belongs(self, release: tuple[str, str] | None) -> bool:
        """Return whether a Release file says that it is the distribution's, and of this release."""
        return release is not None and release[0] in ORIGINS and release[1] in {self.suite + p for p in POCKETS}

    def _use(self, sources: Iterable[Source]) -> None:
        _write(self.root / "envbuilder.sources", "\n".join(source.stanza() for source in sources))

    def _run(self, program: str, *words: str, cwd: Path | None = None) -> str:
        environment = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
        argv = [program, "-c", str(self._configuration), *words]
        try:
            return run(argv, cwd=cwd, env=environment, hint=_NO_APT).stdout
        except ProgramFailedError as error:
            if os.strerror(errno.ENOSPC) in error.stderr:  # else the mirror would seem to be out of reach
                raise DiskFullError(self.root) from error
            raise

    # -- explanations -----------------------------------------------------------------------------------------

    def _not_offered(self, machine: Sequence[Source]) -> HostError:
        offered = sorted({source.suite for source in machine})
        return HostError(
            f"this machine's apt sources do not offer the release `{self.suite}`",
            hint=f"they offer {', '.join(offered) or 'nothing'}: add a source for it below {self._host.etc}, leave "
            "base.suite out of the recipe, or name a base image (base.image)",
        )

    def _unresolved(self, error: ProgramFailedError) -> EnvbuilderError:
        if match := re.search(r"Unable to locate package (\S+)", error.stderr):
            hint = did_you_mean(match[1], _alike(match[1], self.names()))
            return InputError(f"`{self.suite}` has no package `{match[1]}`", hint=hint)
        if match := re.search(r"Package '?([^\s']+)'? has no installation candidate", error.stderr):
            hint = f"name one of those that provide it; `apt-cache showpkg {match[1]}` lists them"
            return InputError(f"`{match[1]}` is a virtual package of `{self.suite}` with several providers", hint=hint)
        text = error.stderr.strip() + "\n" + error.stdout.strip()
        return InputError(f"the packages cannot be installed together on `{self.suite}`:\n{text.strip()}")


def choose(names: Sequence[str], known: Collection[str]) -> tuple[str, ...]:
    """Return each name; of alternatives (``libglib2.0-0t64 | libglib2.0-0``) the first known one, else the last."""
    chosen = []
    for name in names:
        words = [word.strip() for word in name.split("|")]
        chosen.append(next((word for word in words[:-1] if word in known), words[-1]))
    return tuple(chosen)


def architecture() -> str:
    """Return Debian's name for this machine's architecture; raise HostError for one that is not supported."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise HostError(f"machines of architecture {machine} are not supported", hint=", ".join(ARCHITECTURES))
    return ARCHITECTURES[machine]


def _candidates(sources: Iterable[Source], suite: str) -> list[Source]:
    wanted = {suite + pocket for pocket in POCKETS} | set(_ALIASES)
    return [source for source in sources if source.suite in wanted]


def _key(source: Source) -> tuple[str, str]:
    return source.uri.rstrip("/"), source.suite


def _same_keys(source: Source, kept: Iterable[Source]) -> bool:
    """Return whether a source whose lists are missing is bound to the keys of one that is the distribution."""
    return any(source.signed_by is not None and source.signed_by == other.signed_by for other in kept)


def _package(match: re.Match[str], listed: Mapping[Digest, str]) -> DebianPackage:
    name, version, architecture = match["file"].removesuffix(".deb").split("_")
    digest = Digest(match["sha256"])
    return DebianPackage(name, version.replace("%3a", ":"), architecture, listed[digest], digest, int(match["size"]))


def _unreachable(message: str, error: ProgramFailedError | None) -> UnreachableError:
    lines = [line for line in (error.stderr if error else "").splitlines() if line.startswith(("E:", "Err:"))]
    reason = ":\n" + "\n".join(lines[:5]) if lines else ""
    return UnreachableError(
        message + reason, hint="check the machine's network, proxy and apt sources: `apt-get update`"
    )


def _alike(word: str, names: Iterable[str]) -> list[str]:
    """Return the names that may be the nearest: comparing with all sixty thousand takes seconds."""
    return [name for name in names if name[:1] == word[:1] and abs(len(name) - len(word)) <= 4]


def _younger(stamp: Path, seconds: float) -> bool:
    return 0 <= time.time() - stamp.stat().st_mtime < seconds


def _configuration(root: Path) -> str:
    return _CONFIGURATION.format(architecture=architecture(), root=root)


def _write(path: Path, text: str) -> None:
    with atomic_file(path) as file:
        file.write(text.encode())
