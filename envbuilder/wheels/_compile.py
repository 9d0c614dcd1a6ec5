"""Compile Python source to bytecode for others. Stand-alone: runs in the image's Python minor, imports nothing of ours.

Reads batches from stdin, writes answers to stdout, until stdin ends. A batch is a big-endian 32-bit number of sources,
then for each two 32-bit lengths, the path that the code will have and its source. It is read whole before the first
answer is written, so that neither side waits for the other with a full pipe. An answer is a 32-bit length and a .pyc
(PEP 552, unchecked hash), or the length 0 when the source does not compile; answers come in the order of the sources.
"""

import gc
import importlib.util
import marshal
import struct
import sys
import types


def settle(code: types.CodeType, kept: list[object]) -> types.CodeType:
    """Return code that marshal writes in one way only; keep a reference to everything in it.

    marshal marks an object as shareable only when more than one reference to it exists, which for interned strings
    depends on what else this process has seen. With a second reference to each, the marks depend on the code alone.

    The compiler shares equal frozensets between functions, or does not, by where they happen to lie in memory (seen in
    CPython 3.12), and marshal writes a shared object as a reference. With a copy each, there is one way to write them.
    """
    constants = settle_all(code.co_consts, kept)
    if constants is not code.co_consts:
        code = code.replace(co_consts=constants)
    names, varnames, freevars, cellvars = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    kept += (code, code.co_filename, code.co_name, code.co_qualname, code.co_linetable)
    kept += (code.co_consts, names, varnames, freevars, cellvars)
    # Their items are strings.
    kept += names
    kept += varnames
    kept += freevars
    kept += cellvars
    return code


def settle_all(values: tuple[object, ...], kept: list[object]) -> tuple[object, ...]:
    """Return constants with every frozenset copied and every code settled; the same tuple where there are none."""
    settled: list[object] | None = None
    for index, value in enumerate(values):
        new = value
        if isinstance(value, types.CodeType):
            new = settle(value, kept)
        elif isinstance(value, tuple):
            new = settle_all(value, kept)
        elif isinstance(value, frozenset):
            new = frozenset(settle_all(tuple(value), kept))
        if new is not value:
            settled = settled or list(values)
            settled[index] = new
    result = values if settled is None else tuple(settled)
    kept += result
    kept.append(result)
    return result


def compile_source(path: str, source: bytes) -> bytes:
    """Return the .pyc of some source, or nothing when it is not valid Python (templates, Python 2)."""
    try:
        code = compile(source, path, "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return b""
    kept: list[object] = []
    code = settle(code, kept)
    header = importlib.util.MAGIC_NUMBER + struct.pack("<L", 0b01) + importlib.util.source_hash(source)
    return header + marshal.dumps(code)


def intern_singletons() -> None:
    """Intern every string of one Latin-1 character, of which there is one object for each in the whole process.

    marshal writes interned strings with another type, and a source that uses such a letter as a name interns it for
    all sources after it. Interned from the start, it is written the same way always.
    """
    for number in range(256):
        sys.intern(chr(number))


def main() -> None:
    """Answer batches until stdin ends."""
    intern_singletons()
    # Code has no cycles, and there are a great many objects to search for them.
    gc.disable()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := requests.read(4):
        batch = []
        for _ in range(struct.unpack(">L", head)[0]):
            path_size, source_size = struct.unpack(">LL", requests.read(8))
            batch.append((requests.read(path_size).decode(), requests.read(source_size)))
        for path, source in batch:
            compiled = compile_source(path, source)
            answers.write(struct.pack(">L", len(compiled)) + compiled)
        answers.flush()


if __name__ == "__main__":
    main()
