"""Find a Python to copy into an image: uv's standalone one, or one of this machine.

An interpreter fits when it runs, is CPython of the right minor with its headers, and lies in a folder of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuilder import report
from envbuilder.errors import HostError, InputError
from envbuilder.oci.model import canonical_json
from envbuilder.run import ProgramFailedError, ProgramMissingError, run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from envbuilder.store.store import Store

#: After a download of the standalone Python failed, it is not tried again for so long (seconds).
RETRY = 6 * 3600
_PROBE_SECONDS = 20
_PROBE = """
import json, os, platform, sys, sysconfig
paths = sysconfig.get_paths()
print(json.dumps({
    "implementation": platform.python_implementation(), "version": platform.python_version(),
    "executable": os.path.realpath(sys._base_executable), "prefix": os.path.realpath(sys.base_prefix),
    "configured": sysconfig.get_config_var("prefix"), "headers": os.path.exists(
        os.path.join(sysconfig.get_path("include", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix}),
                     "Python.h")),
    "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")), "bits": sys.maxsize.bit_length() + 1,
}))
"""


@dataclass(frozen=True)
class Interpreter:
    """An interpreter that fits: its kind (``managed``, ``host``, ``base``), version, and where it lies, links resolved.

    Of kind ``base`` the version is the minor, and the paths are where the image finds it: nothing is copied.
    """

    kind: str
    version: str
    executable: Path
    prefix: Path

    @property
    def minor(self) -> str:
        """The minor version, ``3.12``."""
        return ".".join(self.version.split(".")[:2])


@dataclass(frozen=True)
class OwnPython:
    """The base's own Python: the prefix where it lies in the image (``/usr``), or None and why there is none that fits."""

    prefix: str | None
    lacking: str = ""


class NoInterpreterError(HostError):
    """None of the kinds of interpreter asked for is to be had; ``tried`` says why, one line each."""

    def __init__(self, minor: str, tried: Sequence[str]) -> None:
        lines = "".join(f"\n  {line}" for line in tried)
        hint = (
            f"`uv python install {minor}` or `pyenv install {minor}` makes one; ENVBUILDER_PYTHON names one that lies "
            "elsewhere; UV_PYTHON_INSTALL_MIRROR names a mirror of the standalone builds"
        )
        if all(line.startswith("base: ") for line in tried):
            hint = f"take a base that has Python {minor}, or let the recipe's `python.from` name another kind as well"
        super().__init__(f"no Python {minor} is to be had for the image:{lines}", hint=hint)
        self.tried = tuple(tried)


def find_interpreter(
    minor: str,
    kinds: Sequence[str],
    store: Store,
    *,
    environ: Mapping[str, str] | None = None,
    own: OwnPython | None = None,
) -> Interpreter:
    """Return the first interpreter of ``minor`` (``3.12``) that is to be had, by kind in the order given.

    ``own`` is what is known of the base's, by default that it lies in ``/usr``. What was found is remembered, and used
    again as long as the file is unchanged and nothing that was preferred to it is due to be tried again.

    Raises:
        NoInterpreterError: there is none; it says what was tried.
        InputError: a kind is not known.

    """
    environ = os.environ if environ is None else environ
    own = own or OwnPython("/usr")
    asked = [environ.get(name, "") for name in ("ENVBUILDER_PYTHON", "PYENV_ROOT", "PATH")]
    base = [own.prefix] if "base" in kinds else []
    key = canonical_json([minor, list(kinds), asked, base]).decode()
    if (remembered := _recall(store, key)) is not None:
        return remembered
    tried: list[str] = []
    for kind in kinds:
        match kind:
            case "managed":
                found = _managed(minor, store, environ, tried)
            case "host":
                found = _host(minor, environ, tried)
            case "base":
                found = _own(minor, own, tried)
            case _:
                raise InputError(f"unknown kind of interpreter `{kind}`", hint="known: `managed`, `host`, `base`")
        if found is not None:
            for line in tried:
                report.detail(line)
            if tried and kind != kinds[0]:
                report.step(
                    f"{tried[0].partition(': ')[2]}; Python {found.version} from {found.prefix} is used instead"
                )
            _remember(store, key, found)
            return found
    raise NoInterpreterError(minor, tried)


def _own(minor: str, own: OwnPython, tried: list[str]) -> Interpreter | None:
    if own.prefix is None:
        tried.append(f"base: {own.lacking}")
        return None
    return Interpreter("base", minor, Path(own.prefix, "bin", f"python{minor}"), Path(own.prefix))


# -- uv's standalone Python ---------------------------------------------------------------------------------------


def _managed(minor: str, store: Store, environ: Mapping[str, str], tried: list[str]) -> Interpreter | None:
    """Return uv's standalone Python: the store's, one that the user has already, or else one that uv downloads."""
    # uv would look at an active virtual environment first.
    users = {name: value for name, value in environ.items() if name not in {"VIRTUAL_ENV", "CONDA_PREFIX"}}
    own = {**users, "UV_PYTHON_INSTALL_DIR": str(store.root / "pythons"), "UV_PYTHON_INSTALL_BIN": "0"}
    for env in (own, users):
        if (found := _installed(minor, store, env, tried)) is not None:
            return found
    return _installed(minor, store, own, tried) if _install(minor, store, own, tried) else None


def _installed(minor: str, store: Store, env: Mapping[str, str], tried: list[str]) -> Interpreter | None:
    words = ("uv", "python", "find", "--no-project", "--managed-python", "--no-python-downloads", minor)
    try:
        path = run(words, cwd=store.root, env=env).stdout.strip()
    except (ProgramFailedError, ProgramMissingError):
        return None
    return _probe(Path(path), minor, "managed", tried)


def _install(minor: str, store: Store, env: Mapping[str, str], tried: list[str]) -> bool:
    """Let uv download its standalone Python; a failure is remembered for ``RETRY``."""
    key = f"{minor} {env.get('UV_PYTHON_INSTALL_MIRROR', '')}"
    failure = store.recall("managed-python", key)
    if failure and 0 <= time.time() - failure["time"] < RETRY:
        tried.append(f"managed: uv's standalone Python was out of reach a short while ago: {failure['reason']}")
        return False
    report.step(f"Fetching uv's standalone Python {minor}")
    try:
        run(("uv", "python", "install", "--no-progress", minor), cwd=store.root, env=env)
    except (ProgramFailedError, ProgramMissingError) as error:
        lines = error.stderr.strip().splitlines() if isinstance(error, ProgramFailedError) else [error.message]
        reason = lines[-1].strip().removeprefix("Caused by: ") if lines else "uv said nothing"
        store.remember("managed-python", key, {"time": int(time.time()), "reason": reason})
        tried.append(f"managed: uv's standalone Python is out of reach: {reason}")
        return False
    return True


# -- an interpreter of this machine -------------------------------------------------------------------------------


def _host(minor: str, environ: Mapping[str, str], tried: list[str]) -> Interpreter | None:
    seen: set[Path] = set()
    for path in _host_candidates(minor, environ):
        real = path.resolve()
        if real in seen:
            continue
        if not os.access(path, os.X_OK):
            if str(path) == environ.get("ENVBUILDER_PYTHON"):
                tried.append(f"host: {path}, which ENVBUILDER_PYTHON names, is no program")
            continue
        seen.add(real)
        if (found := _probe(path, minor, "host", tried)) is not None:
            return found
    tried.append(f"host: no other python{minor} on PATH, in pyenv's versions, /usr/local, /usr or /opt")
    return None


def _host_candidates(minor: str, environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield where an interpreter may lie: named outright, in pyenv's versions (newest first), on PATH, elsewhere."""
    if named := environ.get("ENVBUILDER_PYTHON"):
        yield Path(named)
    home = Path(environ.get("HOME") or "/")
    versions = Path(environ.get("PYENV_ROOT") or home / ".pyenv") / "versions"
    for folder in sorted(versions.glob(f"{minor}.*"), key=lambda path: _numbers(path.name), reverse=True):
        yield folder / "bin" / f"python{minor}"
    for entry in filter(None, environ.get("PATH", "").split(os.pathsep)):
        yield from (Path(entry) / name for name in (f"python{minor}", "python3", "python"))
    yield Path("/usr/local/bin") / f"python{minor}"
    yield Path("/usr/bin") / f"python{minor}"
    yield from sorted(Path("/opt").glob(f"*/bin/python{minor}"))


def _probe(path: Path, minor: str, kind: str, tried: list[str]) -> Interpreter | None:
    """Ask a Python what it is. One that does not fit adds a line to ``tried``, unless its minor alone is another."""
    try:
        done = subprocess.run(
            [path, "-I", "-S", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True,
        )  # fmt: skip
        facts: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        tried.append(f"{kind}: {path}: does not run: {_reason(error)}")
        return None
    if facts["version"].split(".")[:2] != minor.split("."):
        return None
    if (unfit := _unfit(facts)) is not None:
        tried.append(f"{kind}: {path}: {unfit}")
        return None
    return Interpreter(kind, facts["version"], Path(facts["executable"]), Path(facts["prefix"]))


def _reason(error: Exception) -> str:
    match error:
        case OSError(strerror=str(text)):
            return text
        case subprocess.TimeoutExpired():
            return f"no answer in {_PROBE_SECONDS} seconds"
        case subprocess.CalledProcessError(stderr=str(text)) if text.strip():
            return text.strip().splitlines()[-1]
        case _:
            return "its answer is not understood"


def _unfit(facts: Mapping[str, Any]) -> str | None:
    if facts["implementation"] != "CPython" or facts["free_threaded"] or facts["bits"] != 64:
        return "is not the 64 bit CPython with the interpreter lock that wheels are made for"
    if facts["prefix"] == "/usr":
        # Its files are spread over /usr, its site module looks for packages elsewhere, its headers are another package.
        return "belongs to the distribution, and cannot be copied: have the base install it, and use kind `base`"
    if not facts["headers"]:
        return "has no headers (Python.h), which torch.compile and Triton need"
    return None


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(word) for word in name.split(".") if word.isdigit())


# -- what was found before ----------------------------------------------------------------------------------------


def _recall(store: Store, key: str) -> Interpreter | None:
    known = store.recall("interpreter", key)
    if not isinstance(known, dict) or not 0 <= time.time() - known["time"] < RETRY:
        return None
    found = Interpreter(known["kind"], known["version"], Path(known["executable"]), Path(known["prefix"]))
    return found if known["stamp"] == _fingerprint(found) else None


def _remember(store: Store, key: str, found: Interpreter) -> None:
    where = {"executable": str(found.executable), "prefix": str(found.prefix)}
    when = {"stamp": _fingerprint(found), "time": int(time.time())}
    store.remember("interpreter", key, {"kind": found.kind, "version": found.version, **where, **when})


def _fingerprint(interpreter: Interpreter) -> list[list[Any]]:
    """Return what tells cheaply whether an interpreter that was found is another one now: stamps of what starts it."""
    if interpreter.kind == "base":
        return []
    libraries = sorted((interpreter.prefix / "lib").glob(f"libpython{interpreter.minor}*.so*"))
    return [[str(path), stamp(path)] for path in (interpreter.executable, *libraries)]


def stamp(path: str | Path) -> list[int] | None:
    """Return what changes whenever a file's bytes do (size, times, number), or a folder's entries; None if it is gone.

    The time of change is not at anyone's disposal, as that of modification is: tools set it, and keep it when copying.
    """
    try:
        facts = os.stat(path)  # noqa: PTH116 (asked a thousand times: a Path would double what it takes)
    except OSError:
        return None
    return [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]
