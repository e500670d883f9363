"""Whether this machine's processor adds up products of bytes exactly.

x86 processors without VNNI multiply unsigned and signed bytes in pairs and add each pair up in 16 bits, which is
too few for two 8-bit sides. `lower` avoids such pairs for onnxruntime; OpenVINO has no others to choose from.
"""

import platform
from pathlib import Path

LARGEST_SUM = 2**15 - 1
"""Of two products, before it is cut off."""
EXACT = {"avx512_vnni", "avx_vnni", "amx_int8"}
"""What Linux calls the instructions that add up in 32 bits."""


def largest_signed(largest_unsigned: int) -> int:
    """How large signed codes may be that any processor multiplies with unsigned ones up to `largest_unsigned`."""
    return LARGEST_SUM // (2 * largest_unsigned)


def cuts_off_sums() -> bool:
    """True on an x86 processor without VNNI, as far as Linux tells."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    return bool(flags) and not EXACT & set(flags)
