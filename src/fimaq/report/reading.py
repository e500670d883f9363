"""Reading values out of a run's JSON files, which may be old, edited or damaged: what does not fit is absent."""

import math
from typing import Any


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def whole(value: Any) -> int | None:
    """A whole number that is not negative, or None."""
    found = number(value)
    return int(found) if found is not None and found >= 0 and found == int(found) else None


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def shown(value: Any, digits: int = 2, unit: str = "") -> str:
    """A number for people, or a dash where there is none."""
    found = number(value)
    return "–" if found is None else f"{found:.{digits}f}{unit}".replace("-", "−")


def significant(value: Any, digits: int = 3) -> str:
    """A number of any size with so many significant digits."""
    found = number(value)
    if found is None:
        return "–"
    if found == 0:
        return "0"
    text = f"{found:#.{digits}g}".rstrip(".")  # with trailing zeros: 0.030 is known better than 0.03
    if "e" in text:
        mantissa, exponent = text.split("e")
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", "−")


def megabytes(value: Any) -> str:
    """A size for people; gigabytes where there are any."""
    found = number(value)
    if found is None:
        return "–"
    return f"{found / 1e9:.2f} GB" if found >= 1e9 else f"{found / 1e6:.2f} MB"
