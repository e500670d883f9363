"""Confidence intervals: how far a measured share, difference or mean may be from the true one."""

import math
from collections.abc import Sequence

Z95 = 1.959963984540054
"""Two-sided 95 % of a normal distribution lie within so many standard deviations."""


def wilson(successes: float, count: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a share, in [0, 1]; it holds for few images and shares near 0 and 1 too."""
    if count < 1 or not 0 <= successes <= count:
        raise ValueError(f"{successes} of {count} is no share")
    share = successes / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # Exactly 0 or 1 at the ends; rounding would leave 1e-17.
    low = 0.0 if successes == 0 else middle - half
    high = 1.0 if successes == count else middle + half
    return low, high


def paired_difference(only_first: int, only_second: int, count: int, z: float = Z95) -> tuple[float, float]:
    """Interval of second - first, for two shares measured on the same images, in [-1, 1] (Agresti and Min, 2005).

    Of `count` images, `only_first` were right in the first alone and `only_second` in the second alone. Images on
    which both agree do not widen it, which is why it is much narrower than two separate intervals suggest. Half an
    image is added to each of the four cells, so that it does not collapse where there are no differences.
    """
    if count < 1 or min(only_first, only_second) < 0 or only_first + only_second > count:
        raise ValueError(f"{only_first} and {only_second} are no parts of {count}")
    total = count + 2
    first, second = only_first + 0.5, only_second + 0.5
    difference = (second - first) / total
    spread = math.sqrt((first + second) - (second - first) ** 2 / total) / total
    return max(-1.0, difference - z * spread), min(1.0, difference + z * spread)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values; 0 where there are fewer than two."""
    count = len(values)
    if count < 2:
        return 0.0
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)


def around(mean: float, error: float, z: float = Z95) -> tuple[float, float]:
    """Interval of a mean that cannot be negative, such as a KL divergence, from its standard error."""
    return max(0.0, mean - z * error), mean + z * error
