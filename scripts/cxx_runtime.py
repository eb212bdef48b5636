"""Every library takes the C++ runtime from the process that loads it, where torch's libraries take
theirs. Used by build_extensions.py.

A compiler that links libstdc++ statically gives each library a runtime of its own. It exports
`__cxa_throw` and crashes at the first exception, since that is then thrown by one runtime and
unwound by another. Here such a compiler is found by a probe, told to link the shared runtime, and
what it has linked is looked at.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

SHARED_RUNTIME = ["-l:libstdc++.so.6"]  # behind the objects: before the implied static archive
THROW = "__cxa_throw"
_PROBE = "void pagedkv_probe(int value) { throw value; }\n"
_DYNSYM = 11  # section type
_UNDEFINED = 0  # section index of a symbol that another library provides


def link_flags(compiler: Any, folder: Path) -> list[str]:
    """What must be added to every link, by linking a probe with a setuptools compiler in folder.

    Raises:
        SystemExit: the compiler gives a library a runtime of its own whatever it is told.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "probe.cpp"
    source.write_text(_PROBE)
    objects = compiler.compile([str(source)], output_dir=str(folder), extra_postargs=["-fPIC"])
    for flags in ([], SHARED_RUNTIME):
        probe = folder / f"probe{len(flags)}.so"
        compiler.link_shared_object(objects, str(probe), extra_postargs=flags, target_lang="c++")
        if not throws_by_itself(probe):
            return flags
    raise SystemExit(_refusal(probe))


def check(library: Path) -> None:
    """Raises SystemExit where the library brings a C++ runtime of its own."""
    if throws_by_itself(library):
        raise SystemExit(_refusal(library))


def _refusal(library: Path) -> str:
    return (
        f"pagedkv: {library} has libstdc++ linked into it ({THROW} is defined there), and would "
        "crash at its first exception inside torch's process: build with a compiler that links "
        "the shared libstdc++.so.6 (CXX=..., without -static-libstdc++)"
    )


def throws_by_itself(library: Path) -> bool:
    """Whether an ELF library defines what throws an exception; False for other formats."""
    return _dynamic_symbols(library.read_bytes()).get(THROW, False)


def _dynamic_symbols(elf: bytes) -> dict[str, bool]:
    """Names of a 64-bit little-endian ELF file's dynamic symbols, and whether it defines them."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return {}
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    # Of each section: name, type, flags, address, offset, size, link, info, alignment, entry size.
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    found: dict[str, bool] = {}
    for _, kind, _, _, begin, length, link, _, _, entry in sections:
        if kind != _DYNSYM:
            continue
        names = sections[link][4]
        for offset in range(begin, begin + length, entry):
            name, _, _, section = struct.unpack_from("<IBBH", elf, offset)
            end = elf.index(b"\0", names + name)
            found[elf[names + name : end].decode()] = section != _UNDEFINED
    return found
