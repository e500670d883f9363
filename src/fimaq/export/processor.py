"""What processors add up exactly when they multiply bytes, and whether this machine's does.

x86 processors without VNNI multiply unsigned and signed bytes in pairs and add each pair up in 16 bits, which is
too few for two 8-bit sides. `lower` avoids such pairs for onnxruntime, unless a file is for processors with VNNI
alone, where they are the fastest; OpenVINO has no others to choose from.
"""

import platform
from pathlib import Path

LARGEST_SUMS = {"any": 2**15 - 1, "vnni": 2**31 - 1}
"""Of two products, before it is cut off, by the processors that a file can be made for."""
EXACT = {"avx512_vnni", "avx_vnni", "amx_int8"}
"""What Linux calls the instructions that add up in 32 bits."""


def largest_signed(largest_unsigned: int, processor: str = "any") -> int:
    """How large signed bytes may be that `processor` multiplies exactly with others up to `largest_unsigned`."""
    return min(128, LARGEST_SUMS[processor] // (2 * largest_unsigned))


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
