"""Optional parts of an environment: a prebuilt wheel from an address of its own, and what it needs beside the lock."""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from envbuilder import http, report
from envbuilder.errors import InputError, UnreachableError, did_you_mean
from envbuilder.images.layering import Group
from envbuilder.lock.model import Package
from envbuilder.lock.target import best_wheel, supported_tags
from envbuilder.oci.digest import Digest
from envbuilder.wheels.fetch import fetch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from envbuilder.lock.indexconfig import Indexes
    from envbuilder.lock.model import Lock
    from envbuilder.spec.environment import Environment, Extra
    from envbuilder.store.store import Store


class ExtraOutOfReachError(UnreachableError):
    """The prebuilt wheel of an extra cannot be had from where it is published."""

    def __init__(self, extra: Extra, error: http.OutOfReachError | http.NotFoundError) -> None:
        super().__init__(
            f"the prebuilt wheel of the extra `{extra.name}` cannot be had: {error.message} ({extra.reason})",
            hint=f"${variable(extra)} names a copy of the wheel (https:// or file://)",
        )


def variable(extra: Extra) -> str:
    """Return the name of the environment variable that overrides the URL of an extra's wheel."""
    return f"ENVBUILDER_EXTRA_{re.sub(r'[^A-Z0-9]', '_', extra.name.upper())}_URL"


def find_extra(environment: Environment, name: str) -> Extra:
    """Return an environment's extra; InputError with the nearest name when it has none of this name."""
    for extra in environment.extras:
        if extra.name == name:
            return extra
    known = [extra.name for extra in environment.extras]
    raise InputError(
        f"`{environment.name}` has no extra named `{name}`",
        hint=did_you_mean(name, known) or f"`{environment.name}` has no extras",
    )


def prebuilt_url(extra: Extra, lock: Lock) -> str | None:
    """Return the URL of the prebuilt wheel that matches the lock's torch, CUDA and Python; None without a template.

    The keys: ``version`` of the first requirement, ``cuda`` (126), ``cuda-major`` (12), ``torch-minor`` (2.7), ``py``
    (312), and ``abi``: whether torch was built with the C++11 ABI (TRUE, FALSE).
    """
    if extra.wheel is None:
        return None
    values: Mapping[str, str] = {
        "version": _pinned(extra, extra.requires[0])[1],
        "cuda": lock.cuda.replace(".", ""),
        "cuda-major": lock.cuda.partition(".")[0],
        "torch-minor": ".".join(lock.by_name["torch"].version.split(".")[:2]),
        "py": lock.target.python.replace(".", ""),
        # PyTorch moved its wheels to manylinux 2.28 and the C++11 ABI in one step (2.6 for some variants, 2.7 for all).
        "abi": "TRUE" if "manylinux_2_28" in lock.by_name["torch"].file else "FALSE",
    }
    return re.sub(r"\{([^}]*)\}", lambda match: values[match[1]], extra.wheel)


def extra_url(extra: Extra, lock: Lock) -> str | None:
    """Return where the extra's prebuilt wheel is fetched: the environment variable's URL, else as ``prebuilt_url``."""
    return os.environ.get(variable(extra)) or prebuilt_url(extra, lock)


def provide_extra(extra: Extra, lock: Lock, store: Store, indexes: Indexes) -> Group:
    """Bring an extra's wheels into the store and return them as the group of one layer.

    What the lock has already at the version asked for is not added again.

    Raises:
        ExtraOutOfReachError: the prebuilt wheel cannot be fetched.
        InputError: a requirement is no exact pin, or clashes with the lock, or has no wheel for the target.

    """
    packages = []
    url = extra_url(extra, lock)
    for number, text in enumerate(extra.requires):
        name, version = _pinned(extra, text)
        locked = lock.by_name.get(name)
        if locked is not None and locked.version != version:
            raise InputError(f"the extra `{extra.name}` needs {text}, but the environment has {name} {locked.version}")
        if locked is None:
            prebuilt = number == 0 and url is not None
            packages.append(_prebuilt(extra, url or "", store, indexes) if prebuilt else _on_index(text, lock, indexes))
    fetch(packages, store, indexes)
    return Group(f"extra {extra.name}", tuple(sorted(packages, key=lambda package: package.name)))


def _pinned(extra: Extra, text: str) -> tuple[str, str]:
    requirement = Requirement(text)
    pins = [specifier.version for specifier in requirement.specifier if specifier.operator == "=="]
    if len(pins) != 1:
        raise InputError(f"the extra `{extra.name}`: `{text}` must name one version with ==")
    return canonicalize_name(requirement.name), pins[0]


def _prebuilt(extra: Extra, url: str, store: Store, indexes: Indexes) -> Package:
    """Download the wheel. No lock knows its hash: the one it has is reported, and enters the image's digest."""
    report.step(f"fetching {http.redact(url)}")
    sha256, size = hashlib.sha256(), 0
    try:
        with store.writer() as blob:
            with http.get(indexes.session, url) as response:
                for data in http.chunks(response):
                    blob.file.write(data)
                    sha256.update(data)
                    size += len(data)
            digest = Digest(sha256.hexdigest())
            blob.commit(digest)
    except (http.OutOfReachError, http.NotFoundError) as error:
        raise ExtraOutOfReachError(extra, error) from error
    file = url.rpartition("/")[2].replace("%2B", "+")
    name, version, _, _ = parse_wheel_filename(file)
    if extra.sha256 is not None and extra.sha256 != digest.hex:
        raise InputError(f"{file} has sha256 {digest.hex}, but the environment says {extra.sha256}")
    if extra.sha256 is None:
        report.warning(f"{file} is in no lock; it has sha256 {digest.hex}")
    return Package(name, str(version), file, digest, size, ())


def _on_index(text: str, lock: Lock, indexes: Indexes) -> Package:
    """Return the wheel of an exact pin that the default index has for the lock's target."""
    requirement = Requirement(text)
    name = canonicalize_name(requirement.name)
    files = {
        file.file: file
        for file in indexes.of(None).files(name)
        if file.file.endswith(".whl") and requirement.specifier.contains(parse_wheel_filename(file.file)[1])
    }
    best = best_wheel(files, supported_tags(lock.target))
    if best is None or files[best].digest is None or files[best].size is None:
        raise InputError(f"the index {indexes.of(None)} has no wheel of {text} for the target with a hash and a size")
    found = files[best]
    version = str(parse_wheel_filename(best)[1])
    return Package(name, version, best, found.digest, found.size, ())  # type: ignore[arg-type]  # checked above
