"""How many rounds until everything was trained: the lemmas of the paper's appendix, and the same for nodes.

The lemmas are about disjoint sub-models, one of which is drawn uniformly each round (collecting coupons);
rolling takes them in turn. The nodes of a layer are another matter: there, a window holds many of them at
once, and consecutive rolling windows overlap.
"""

from math import ceil, comb, log, sqrt

import numpy as np
import torch
from numpy.typing import NDArray

from fedrolex.core import FedrolexError, random_words

NEGLIGIBLE = 1e-18  # where the integrand of Lemma 2 is cut off
BITS = 64  # behind the point, for sums whose terms are far larger than the result


def expected_rounds(indices: int, times: int = 1) -> float:
    """Lemma 2, and with ``times`` 1 Lemma 1: expected rounds until each of ``indices`` was drawn ``times`` times.

    I ∫ 1 − (1 − Q(t))^I dt over t ≥ 0, where Q(t) = e^−t (1 + t + … + t^(m−1)/(m−1)!) is the regularised upper
    incomplete gamma function of order m = ``times``. Gauss-Legendre, accurate to far better than 1e-9.
    """
    _positive(indices=indices, times=times)
    order = torch.tensor(float(times), dtype=torch.float64)

    def missing(t: torch.Tensor) -> torch.Tensor:
        share: torch.Tensor = torch.special.gammaincc(order, t)
        return share

    end = 1.0
    while indices * float(missing(torch.tensor(end, dtype=torch.float64))) > NEGLIGIBLE:
        end *= 2
    panels = ceil(end / sqrt(times))  # the integrand falls from 1 to 0 within a few √m
    nodes, weights = np.polynomial.legendre.leggauss(20)
    at = (np.arange(panels)[:, None] + (nodes + 1) / 2) * end / panels
    some = -torch.expm1(indices * torch.log1p(-missing(torch.from_numpy(at)))).numpy()
    return indices * float((some @ weights).sum()) * end / panels / 2


def asymptote(indices: int, times: int = 1) -> float:
    """What the paper says Lemma 2 tends to, I log I + I (m − 1) log log I.

    It leaves out a term that grows with I itself, so for models of any real size it is far off.
    """
    _positive(times=times)
    if indices < 2:
        raise FedrolexError(f"the asymptote of {indices} indices: log log of it is not a number, give 2 or more")
    return indices * (log(indices) + (times - 1) * log(log(indices)))


def rolling_rounds(indices: int, times: int = 1) -> int:
    """Rounds until each of ``indices`` disjoint sub-models, taken in turn, was trained ``times`` times."""
    _positive(indices=indices, times=times)
    return indices * times


def simulated_rounds(indices: int, times: int, trials: int, seed: int = 0) -> tuple[float, float]:
    """Lemma 2 by drawing: mean and standard error over ``trials`` trials."""
    _positive(indices=indices, times=times, trials=trials)
    counts = np.zeros((trials, indices), np.int64)
    missing = np.full(trials, indices)
    needed = np.zeros(trials, np.int64)
    going = np.arange(trials)
    while len(going):
        round = int(needed[going[0]])
        drawn = random_words(len(going), seed, "lemma", indices, times, round) % np.uint64(indices)
        counts[going, drawn] += 1
        missing[going] -= counts[going, drawn] == times
        needed[going] += 1
        going = going[missing[going] > 0]
    return _mean(needed)


def rolling_node_rounds(size: int, width: int, times: int = 1) -> int:
    """Rounds until a window of ``width`` moving by one node a round has held each of ``size`` nodes ``times`` times.

    With m = q·w + r, 1 ≤ r ≤ w: q·K + K − w + r. A node waits for the window to come round again, then is
    held w times in a row.
    """
    _window(size, width)
    _positive(times=times)
    turns, rest = divmod(times - 1, width)
    return turns * size + size - width + rest + 1


def random_node_rounds(size: int, width: int) -> float:
    """Expected rounds until random windows, ``width`` distinct nodes of ``size`` each round, have held every node.

    Inclusion and exclusion, Σ (−1)^(i+1) C(K, i) / (1 − C(K−i, w)/C(K, w)): the terms are as large as 2^K and
    cancel, so they are added as integers, in units of 2^−64.
    """
    _window(size, width)
    every = comb(size, width)
    total: int = 0
    for i in range(1, size + 1):
        term: int = (comb(size, i) * every << BITS) // (every - comb(size - i, width))
        total += term if i % 2 else -term
    return float(total / 2**BITS)


def simulated_node_rounds(size: int, width: int, trials: int, seed: int = 0) -> tuple[float, float]:
    """:func:`random_node_rounds` by drawing: mean and standard error over ``trials`` trials."""
    _window(size, width)
    _positive(trials=trials)
    held = np.zeros((trials, size), bool)
    needed = np.zeros(trials, np.int64)
    going = np.arange(trials)
    while len(going):
        round = int(needed[going[0]])
        keys = random_words(len(going) * size, seed, "nodes", size, width, round).reshape(-1, size)
        held[going[:, None], np.argpartition(keys, width - 1)[:, :width]] = True
        needed[going] += 1
        going = going[~held[going].all(1)]
    return _mean(needed)


def _mean(values: NDArray[np.int64]) -> tuple[float, float]:
    """Mean and its standard error; of one value alone, the error is infinite."""
    error = float(values.std(ddof=1)) / sqrt(len(values)) if len(values) > 1 else float("inf")
    return float(values.mean()), error


def _positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise FedrolexError(f"{name} is {value}: give 1 or more")


def _window(size: int, width: int) -> None:
    if not 1 <= width <= size:
        raise FedrolexError(f"a window of {width} of {size} nodes: give 1 ≤ width ≤ size")
