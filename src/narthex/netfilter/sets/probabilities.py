"""What the printed probabilities of iptables mean.

The kernel's xt_statistic stores a probability as a multiple of 2**-31, rounded by iptables. `0.33333333349` is 715827883 / 2**31: what
becomes of "1/3", which kube-proxy writes with ten decimals, and with five before 1.19. A probability that is stored exactly as such a
1/n is read as 1/n, and the difference is declared; any other is read as it is stored. Two such numbers differ by more than 2**-31 up to
n = 46,340, so that no other probability is taken for one of them.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

_UNIT = 1 << 31
_DECIMALS = (10, 5)
"""kube-proxy's computeProbability: "%0.10f", and "%0.5f" before 1.19."""
_MOST = 46_340


@lru_cache(maxsize=4096)
def read_probability(printed: str) -> tuple[Fraction, Fraction]:
    """Return the probability that a printed one stands for, and how much less or more the kernel applies. Raises ValueError."""
    stored = _stored(Fraction(printed))
    kernel = Fraction(stored, _UNIT)
    if stored:
        count = round(_UNIT / stored)
        if 1 <= count <= _MOST:
            share = Fraction(1, count)
            for decimals in _DECIMALS:
                if stored == _stored(Fraction(f"{1 / count:.{decimals}f}")):
                    return share, kernel - share
    return kernel, Fraction(0)


def _stored(value: Fraction) -> int:
    """Return the number that libxt_statistic stores: lround(2**31 * p), from 0 to 2**31."""
    return min(max(int(value * _UNIT + Fraction(1, 2)), 0), _UNIT)


@lru_cache(maxsize=65536)
def share(part: int, whole: int) -> Fraction:
    """Return a fraction; the same object for the same numbers, so that products of them are found by identity."""
    return Fraction(part, whole)


@lru_cache(maxsize=4096)
def most_rounding(count: int) -> Fraction:
    """Return a bound of what rounding changes in the share of one of `count` endpoints that a chain of rules draws from."""
    of_rules = (abs(Fraction(_stored(Fraction(1, each)), _UNIT) - Fraction(1, each)) for each in range(2, count + 1))
    return sum(of_rules, Fraction(0)) + Fraction(count, 10**11)
