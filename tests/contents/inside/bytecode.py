"""Compare the bytecode below some folders with its sources. Runs inside an image, with the image's own interpreter.

Usage: ``bytecode.py OUT SHARE FOLDER...``. OUT becomes JSON: ``{"checked": n, "compared": n, "problems": [text, ...]}``.
Of every source: there is bytecode exactly when it compiles, of this interpreter, hash-based and unchecked, with the
source's hash. Of one source in SHARE, by a hash of its path: the bytecode is the same code as the import system makes
of the source now, for that path. Stand-alone: needs nothing but Python's standard library.
"""

import importlib.machinery
import importlib.util
import json
import marshal
import sys
import types
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

#: PEP 552: hash-based, and not checked against the source when it is imported.
HEADER = importlib.util.MAGIC_NUMBER + (0b01).to_bytes(4, "little")


def check(share: int, path: str) -> tuple[bool, str]:
    """Return whether the code of a source was compared, and what is wrong, or nothing."""
    source = Path(path).read_bytes()
    cached = Path(importlib.util.cache_from_source(path))
    if not cached.exists():
        return False, "has no bytecode though it compiles" if compiled(source, path) is not None else ""
    data = cached.read_bytes()
    if data[:16] != HEADER + importlib.util.source_hash(source):
        return False, f"has bytecode of another kind or of another source: {data[:16].hex()}"
    if zlib.crc32(path.encode()) % share:
        return False, ""
    return True, compare(marshal.loads(data[16:]), source, path)  # noqa: S302  (our own image's)


def compare(code: types.CodeType, source: bytes, path: str) -> str:
    """Return what is wrong with the code of a source, or nothing."""
    if code != compiled(source, path):
        return "has other bytecode than its source compiles to"
    names = {inner.co_filename for inner in codes(code)} - {path}
    return f"has bytecode that names {sorted(names)}" if names else ""


def compiled(source: bytes, path: str) -> types.CodeType | None:
    """Return what the import system makes of a source (as py_compile does, which pip and uv call); None if nothing."""
    try:
        code: types.CodeType = importlib.machinery.SourceFileLoader("<any>", path).source_to_code(source, path)
    except (SyntaxError, ValueError):
        return None
    return code


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and all within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def orphans(folder: Path) -> Iterator[str]:
    """Yield bytecode that has no source."""
    for cached in folder.rglob("__pycache__/*.pyc"):
        name = cached.name.rpartition(".cpython-")[0]  # source_from_cache() refuses names with more dots
        if not (cached.parent.parent / f"{name}.py").exists():
            yield f"{cached}: has no source"


def main(target: str, share: str, *folders: str) -> None:
    """Check all sources below the folders."""
    warnings.simplefilter("ignore")
    paths = sorted(str(path) for folder in folders for path in Path(folder).rglob("*.py"))
    with ProcessPoolExecutor(2) as pool:
        found = list(pool.map(partial(check, int(share)), paths, chunksize=100))
    problems = [f"{path}: {problem}" for path, (_, problem) in zip(paths, found, strict=True) if problem]
    problems += [problem for folder in folders for problem in orphans(Path(folder))]
    report = {"checked": len(paths), "compared": sum(compared for compared, _ in found), "problems": problems}
    Path(target).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
