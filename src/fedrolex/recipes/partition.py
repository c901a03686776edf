"""How examples are spread over clients, as a recipe says it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from fedrolex.core import FedrolexError, check_numbers, check_words
from fedrolex.rounds import Fleet
from fedrolex.slicing import exact
from fedrolex.tasks.partition import Affinity, Partition, by_label, dirichlet, even, heterofl, rare_classes, shards

FOLLOWING = ("iid", "labels", "dirichlet")  # can give classes to some clients rather than others


@dataclass(frozen=True, kw_only=True)
class PartitionRecipe:
    """How examples are spread over clients.

    Attributes:
        name: ``iid``; ``labels``: exactly ``labels`` a client; ``heterofl``: at most ``labels``, as published,
            with unused data; ``dirichlet``: by ``alpha``; ``shards``: ``labels`` shards a client.
        labels: labels (or shards) a client.
        alpha: concentration of the Dirichlet draw.
        smallest: fewest examples a client may have in a Dirichlet draw.
        balanced: whether that draw stops giving to clients that have their fair share.
        rare: classes that belong to the small devices.
        rare_capacity: the largest capacity of a small device.
        rare_elsewhere: what the others get of the rare classes, compared with a small device: 0 is nothing.
    """

    name: Literal["iid", "labels", "heterofl", "dirichlet", "shards"] = "iid"
    labels: int = 2
    alpha: float = 0.5
    smallest: int = 10
    balanced: bool = True
    rare: list[int] = field(default_factory=list)
    rare_capacity: str = "1/8"
    rare_elsewhere: float = 0.0

    def __post_init__(self) -> None:
        check_words("task.partition", self)
        check_numbers("task.partition", self, least={"labels": 1, "smallest": 0})
        exact(self.rare_capacity)
        if not 0 < self.alpha <= 1e9:
            raise FedrolexError(f"task.partition.alpha is {self.alpha}: give a number above 0, at most 1e9")
        if not 0 <= self.rare_elsewhere <= 1:
            raise FedrolexError(f"task.partition.rare_elsewhere is {self.rare_elsewhere}: give a number from 0 to 1")
        if self.rare and self.name not in FOLLOWING:
            raise FedrolexError(f"task.partition.rare needs one of {', '.join(FOLLOWING)}, not {self.name}")

    def split(
        self, y: Tensor, test_y: Tensor, classes: int, fleet: Fleet, scale: int, seed: int
    ) -> tuple[Partition, Partition | None]:
        """Rows of the training examples for each client and, where the partition has them, of the test set."""
        who, affinity = fleet.clients, self._affinity(classes, fleet, scale)
        kinds: dict[str, Callable[[], Partition | tuple[Partition, Partition]]] = {
            "iid": lambda: even(y, who, seed, affinity),
            "labels": lambda: by_label(y, classes, who, self.labels, seed, affinity),
            "heterofl": lambda: heterofl(y, test_y, classes, who, self.labels, seed),
            "dirichlet": lambda: dirichlet(
                y, who, self.alpha, seed, smallest=self.smallest, balanced=self.balanced, affinity=affinity
            ),
            "shards": lambda: shards(y, who, self.labels, seed),
        }
        found = kinds[self.name]()
        return found if isinstance(found, tuple) else (found, None)

    def _affinity(self, classes: int, fleet: Fleet, scale: int) -> Affinity | None:
        if not self.rare:
            return None
        limit = exact(self.rare_capacity) / scale
        small = [fleet.capacity(client) <= limit for client in range(fleet.clients)]
        return rare_classes(fleet.clients, classes, small, self.rare, self.rare_elsewhere)
