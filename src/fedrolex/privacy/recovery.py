"""Secrets from shares, some of which may be lies, and who is to blame where a sum comes to nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from fedrolex.core import FedrolexError
from fedrolex.privacy.masks import joined

TRIES = 200


class AccusedError(FedrolexError):
    """Devices that others cannot make a sum with.

    Args:
        devices: their numbers.
        why: what they did, in a few words.
    """

    def __init__(self, devices: Sequence[int], why: str) -> None:
        self.devices, self.why = list(devices), why
        super().__init__(f"device {', '.join(map(str, devices))} {why}")


@dataclass
class Recovery:
    """Joins shares to secrets that are known when they are seen.

    Attributes:
        threshold: how many shares give a secret.
        liars: devices that gave shares which do not fit; their shares are not used again.
    """

    threshold: int
    liars: set[int] = field(default_factory=set)

    def secret(self, given: Mapping[int, bytes], fits: Callable[[bytes], bool]) -> bytes | None:
        """The secret that enough shares give, by the devices that gave them; None where no choice of them does."""

        def found(chosen: Sequence[int]) -> bytes | None:
            try:
                text = joined([given[device] for device in chosen], self.threshold)
            except ValueError:  # of two alike, or padded in a way that none is
                return None
            return text if fits(text) else None

        honest = sorted(set(given) - self.liars)
        for tries, chosen in enumerate(self._choices(honest)):
            text = found(chosen)
            if text is None:
                continue
            if tries:
                others = [device for device in honest if device not in chosen]
                self.liars |= {device for device in others if found([*chosen[1:], device]) is None}
            return text
        return None

    def _choices(self, devices: Sequence[int]) -> Iterator[Sequence[int]]:
        """Some choices of as many devices as are needed, the first ones first."""
        if len(devices) < self.threshold:
            return
        yield devices[: self.threshold]
        draw = Random(0)  # noqa: S311 - nothing here is secret
        for _ in range(TRIES if len(devices) > self.threshold else 0):
            yield draw.sample(devices, self.threshold)
