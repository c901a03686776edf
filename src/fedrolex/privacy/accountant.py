"""What a run's noise is worth: ε, from the privacy loss distributions of Google's dp-accounting."""

from functools import lru_cache
from math import sqrt

from fedrolex.core import FedrolexError


@lru_cache
def epsilon(noise: float, rate: float, rounds: int, delta: float) -> float:
    """ε after some rounds of the Gaussian mechanism on Poisson samples; infinite without noise.

    For neighbours that differ by one client, added or removed with all its data.

    Args:
        noise: standard deviation of the noise over the largest norm of one client's part of the sum.
        rate: the chance that a client takes part in a round.
        rounds: how many.
        delta: the chance that is not covered by ε.
    """
    try:
        import dp_accounting
        from dp_accounting.pld import PLDAccountant
    except ImportError as error:
        raise FedrolexError("the privacy accountant needs dp-accounting: pip install 'fedrolex[flower]'") from error
    if not noise:
        return float("inf")
    if not rounds:
        return 0.0
    if rate == 1:  # so many Gaussian mechanisms are one
        return float(PLDAccountant().compose(dp_accounting.GaussianDpEvent(noise / sqrt(rounds))).get_epsilon(delta))
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    return float(PLDAccountant().compose(event, rounds).get_epsilon(delta))
