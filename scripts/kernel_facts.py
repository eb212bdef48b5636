"""What the compiler made of the kernels: how many there are, their registers and stack, and whether
those that are written for tensor cores use them. A new compiler may change it without a word.

Usage: python scripts/kernel_facts.py [library], by default python/pagedkv/_ops_cuda.so. Prints a
table and exits with 1 where a limit is missed. Needs cuobjdump and nvdisasm: on PATH, or of the
packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "python" / "pagedkv" / "_ops_cuda.so"

MAX_LIBRARY_BYTES = 40 * 2**20
# Registers that do not fit go to the stack, in memory. A few outside the main loop cost nothing;
# wider heads than 128 are padded to 192 or 256, where some must.
ATTENTION = ("decode_", "prefill_", "prefix_")
MAX_STACK_BYTES = 256
MAX_DIM_WITHOUT_SPILLS = 128
# Products of a warpgroup: 64 rows by so many columns. A narrow one wastes the tensor cores.
WGMMA_KERNEL = "prefill_wgmma_kernel"
MIN_WGMMA_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Kernel:
    """symbol is mangled; head_dim is the padded one, or 0 where the kernel has none."""

    arch: str
    symbol: str
    registers: int
    stack_bytes: int

    @property
    def name(self) -> str:
        """The function's own name: the last of the length-prefixed ones before the arguments."""
        position, name = self.symbol.index("_ZN") + 3, self.symbol
        while length := re.match(r"\d+", self.symbol[position:]):
            begin = position + length.end()
            position = begin + int(length[0])
            name = self.symbol[begin:position]
        return name

    @property
    def head_dim(self) -> int:
        numbers = re.search(r"Li(\d+)E", self.symbol)
        return int(numbers[1]) if numbers else 0


def kernels_of(usage: str) -> Iterator[Kernel]:
    """The kernels in the output of cuobjdump -res-usage."""
    arch = ""
    for match in re.finditer(
        r"^arch = (\S+)|Function (_ZN\S+):\s+REG:(\d+) STACK:(\d+)", usage, re.MULTILINE
    ):
        if match[1]:
            arch = match[1]
        else:
            yield Kernel(arch, match[2], int(match[3]), int(match[4]))


def table(kernels: Iterable[Kernel]) -> list[str]:
    """A line for each name on each architecture, and their number."""
    groups: defaultdict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.arch, kernel.name].append(kernel)
    lines = ["| kernel | arch | number | registers | most stack, bytes |", "| --- " * 5 + "|"]
    for (arch, name), group in sorted(groups.items()):
        registers = [kernel.registers for kernel in group]
        stack = max(kernel.stack_bytes for kernel in group)
        lines.append(
            f"| {name} | {arch} | {len(group)} | {min(registers)} to {max(registers)} | {stack} |"
        )
    return [*lines, f"| all | | {sum(map(len, groups.values()))} | | |"]


def spills(kernels: Iterable[Kernel]) -> list[str]:
    """Attention kernels of the usual head sizes with more on the stack than allowed."""
    return [
        f"{kernel.name} of head_dim {kernel.head_dim} ({kernel.arch}) has {kernel.stack_bytes} "
        f"bytes of stack, at most {MAX_STACK_BYTES} are allowed: {kernel.symbol}"
        for kernel in kernels
        if kernel.name.startswith(ATTENTION)
        and kernel.head_dim <= MAX_DIM_WITHOUT_SPILLS
        and kernel.stack_bytes > MAX_STACK_BYTES
    ]


def narrow_products(symbols: Iterable[str], sass: str) -> list[str]:
    """Of kernels by wgmma, those whose machine code has no such products, or narrow ones."""
    columns: dict[str, list[int]] = {symbol: [] for symbol in symbols}
    current: list[int] = []
    for match in re.finditer(r"Function : (\S+)|HGMMA\.64x(\d+)x", sass):
        if match[1]:
            current = columns.setdefault(match[1], [])
        else:
            current.append(int(match[2]))
    return [
        f"wgmma products of {sorted(set(widths)) or 'no'} columns, at least {MIN_WGMMA_COLUMNS} "
        f"are expected: {symbol}"
        for symbol, widths in columns.items()
        if not widths or min(widths) < MIN_WGMMA_COLUMNS
    ]


def tool_folders() -> list[str]:
    """Where the packages put their programs."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    return [str(folder) for folder in sorted(packages.glob("*/bin"))]


def cuobjdump(*arguments: str) -> str:
    path = os.pathsep.join([*tool_folders(), os.environ.get("PATH", "")])
    program = shutil.which("cuobjdump", path=path)
    if program is None or shutil.which("nvdisasm", path=path) is None:
        raise SystemExit(
            "kernel_facts: no cuobjdump and nvdisasm: pip install nvidia-cuda-cuobjdump "
            "nvidia-cuda-nvdisasm"
        )
    # It warns once a file in the library that it has not found the function there.
    run = subprocess.run(
        [program, *arguments], capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    if run.returncode:
        raise SystemExit(f"kernel_facts: cuobjdump failed: {run.stderr[-500:]}")
    return run.stdout


def main(library: Path) -> int:
    kernels = list(kernels_of(cuobjdump("-res-usage", str(library))))
    print("\n".join(table(kernels)))
    problems = spills(kernels)
    size = library.stat().st_size
    print(f"{library.name}: {size / 2**20:.1f} MB")
    if size > MAX_LIBRARY_BYTES:
        problems.append(f"{library.name} has {size} bytes, at most {MAX_LIBRARY_BYTES} are allowed")
    symbols = [k.symbol for k in kernels if k.name == WGMMA_KERNEL and k.arch == "sm_90a"]
    if symbols:
        wanted = ("-arch", "sm_90a", "-fun", ",".join(symbols))
        problems += narrow_products(symbols, cuobjdump("-sass", *wanted, str(library)))
    elif any(kernel.arch == "sm_90a" for kernel in kernels):
        problems.append(f"no {WGMMA_KERNEL} for sm_90a")
    for problem in problems:
        print(f"kernel_facts: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else LIBRARY))
