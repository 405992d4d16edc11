"""The ratio of times from different rounds, its confidence interval, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median
from typing import Literal

from warpwave.workbench.bench.timing import Ratio

Outcome = Literal["FASTER", "SLOWER", "SAME", "UNCLEAR"]
MARGIN = 0.02  # smaller differences count as none
MOST_COUNTED = 2500  # pairs of samples counted exactly; the cost is the number of pairs times that of the samples


def unpaired_ratio(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Ratio:
    """Returns the factor by which `a` is larger than `b`: above 1 if b is faster.

    The estimate is the median of all ratios of a sample of `a` to a sample of `b` (Hodges and Lehmann, 1963). The
    interval lies between two order statistics of the ratios, chosen by the exact distribution of the rank sum (Mann and
    Whitney, 1947). It contains the true factor in at least 95 % of experiments if `a` and `b` have the same
    distribution apart from that factor and the samples are independent. With fewer than 4 samples per side there is no
    interval.

    Samples of one run are not independent: the card's temperature and the memory's addresses persist. Between runs the
    interval is therefore too narrow, and `Spread.widen` corrects it.
    """
    ratios = sorted(x / y for x in a for y in b)
    rank = _interval_rank(len(a), len(b), confidence)
    if rank is None:
        return Ratio(median(ratios), None, None)
    return Ratio(median(ratios), ratios[rank], ratios[-1 - rank])


@dataclass(frozen=True)
class Spread:
    """The variation of unchanged code from run to run, in logarithms of time.

    Attributes:
        sigma: standard deviation of one contender's ratio around the mean ratio of its case.
        degrees: degrees of freedom of the estimate; 0 if there was no data.
    """

    sigma: float
    degrees: int

    @classmethod
    def of(cls, cases: Iterable[Sequence[float]]) -> Spread:
        """Estimates the spread from the ratios, per case, of contenders whose code is the same in both runs."""
        squares, degrees = 0.0, 0
        for ratios in cases:
            if len(ratios) > 1:
                logs = [math.log(ratio) for ratio in ratios]
                squares += sum((x - fmean(logs)) ** 2 for x in logs)
                degrees += len(logs) - 1
        return cls(math.sqrt(squares / degrees) if degrees else 0.0, degrees)

    def widen(self, ratio: Ratio, peers: int) -> Ratio:
        """Widens the interval of a ratio that was divided by the mean of `peers` unchanged contenders, to cover
        variation between runs: unchanged code lies within `t * sigma * sqrt(1 + 1 / peers)` of 1 in 95 % of them."""
        if ratio.low95 is None or ratio.high95 is None or not self.degrees:
            return ratio
        reach = student_t(self.degrees) * self.sigma * math.sqrt(1 + 1 / peers)
        below, above = math.log(ratio.median / ratio.low95), math.log(ratio.high95 / ratio.median)
        return Ratio(
            ratio.median,
            ratio.median * math.exp(-math.hypot(below, reach)),
            ratio.median * math.exp(math.hypot(above, reach)),
        )


def student_t(degrees: int) -> float:
    """Returns the 97.5 % quantile of Student's t, within 0.5 %."""
    exact = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447}
    if degrees in exact:
        return exact[degrees]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def outcome(ratio: Ratio, margin: float = MARGIN) -> Outcome:
    """Returns the verdict of a ratio for the second of the two.

    SAME if the whole interval lies within `margin` of 1; else FASTER or SLOWER if it lies on one side of 1; otherwise,
    or without an interval, UNCLEAR, which more rounds would resolve.
    """
    if ratio.low95 is None or ratio.high95 is None:
        return "UNCLEAR"
    if 1 / (1 + margin) <= ratio.low95 and ratio.high95 <= 1 + margin:
        return "SAME"
    if ratio.low95 > 1:
        return "FASTER"
    return "SLOWER" if ratio.high95 < 1 else "UNCLEAR"


def _interval_rank(n: int, m: int, confidence: float) -> int | None:
    """Returns the largest r for which [r-th smallest, r-th largest] (from 0) of the n * m ratios covers the factor with
    this confidence.

    The factor is outside with probability 2 * P(U <= r), where U is the Mann-Whitney statistic of two samples of the
    same distribution. It is counted exactly for few samples; for many, U is approximated by a normal distribution.
    """
    if n * m > MOST_COUNTED:
        reach = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(n * m * (n + m + 1) / 12)
        return math.floor((n * m - 1) / 2 - reach) - 1
    counts = _rank_sum_counts(n, m)
    total, outside, rank = sum(counts), 0.0, None
    for r in range(n * m // 2):
        outside += 2 * counts[r] / total
        if outside > 1 - confidence:
            break
        rank = r
    return rank


def _rank_sum_counts(n: int, m: int) -> list[int]:
    """Returns the number of orderings of n and m samples in which U is 0, 1, ..., n * m; all are equally likely.

    They are the coefficients of the Gaussian binomial, the product over i of (1 - q^(n + i)) / (1 - q^i).
    """
    size = n * m + 1
    counts = [1] + [0] * (size - 1)
    for i in range(1, m + 1):
        for u in range(size - 1, n + i - 1, -1):
            counts[u] -= counts[u - n - i]
        for u in range(i, size):
            counts[u] += counts[u - i]
    return counts
