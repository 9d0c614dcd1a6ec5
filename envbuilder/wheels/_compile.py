"""Compile Python source to bytecode for others. Stand-alone: runs in the image's Python minor, imports nothing of ours.

Reads requests from stdin, writes answers to stdout, until stdin ends. A request is two big-endian 32-bit lengths, then
the path that the code will have and its source. An answer is a 32-bit length and a .pyc (PEP 552, unchecked hash), or
the length 0 when the source does not compile.
"""

import importlib.util
import marshal
import struct
import sys
import types


def hold(value: object, kept: list[object]) -> None:
    """Keep a reference to everything in a code object.

    marshal marks an object as shareable only when more than one reference to it exists, which for interned strings
    depends on what else this process has seen. With a second reference to each, the marks depend on the code alone.
    """
    kept.append(value)
    if isinstance(value, types.CodeType):
        parts = (value.co_consts, value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
        for part in (*parts, value.co_filename, value.co_name, value.co_qualname, value.co_linetable):
            hold(part, kept)
    elif isinstance(value, (tuple, frozenset)):
        for item in value:
            hold(item, kept)


def separate(code: types.CodeType) -> types.CodeType:
    """Return code in whose constants no two frozensets are one object.

    The compiler shares equal frozensets between functions, or does not, by where they happen to lie in memory (seen in
    CPython 3.12), and marshal writes a shared object as a reference. With a copy each, there is one way to write them.
    """

    def copied(value: object) -> object:
        if isinstance(value, types.CodeType):
            return separate(value)
        if isinstance(value, frozenset):
            return frozenset(list(value))
        return copied_all(value) if isinstance(value, tuple) else value

    def copied_all(values: tuple[object, ...]) -> tuple[object, ...]:
        items = tuple(copied(value) for value in values)
        return items if any(new is not old for new, old in zip(items, values, strict=True)) else values

    constants = copied_all(code.co_consts)
    return code if constants is code.co_consts else code.replace(co_consts=constants)


def compile_source(path: str, source: bytes) -> bytes:
    """Return the .pyc of some source, or nothing when it is not valid Python (templates, Python 2)."""
    try:
        code = compile(source, path, "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return b""
    code = separate(code)
    kept: list[object] = []
    hold(code, kept)
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
    """Answer requests until stdin ends."""
    intern_singletons()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := requests.read(8):
        path_size, source_size = struct.unpack(">LL", head)
        path = requests.read(path_size).decode()
        compiled = compile_source(path, requests.read(source_size))
        answers.write(struct.pack(">L", len(compiled)) + compiled)
        answers.flush()


if __name__ == "__main__":
    main()
