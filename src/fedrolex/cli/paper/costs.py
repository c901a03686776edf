"""What a run would send and compute, counted from its recipe alone: neither data nor training is needed.

Who trains which width in which round follows from the recipe and its seed, and images are spread by the size of their
classes, so the figures are those that the run would report, to the byte. The users of text are in the data: there the
cohort is counted by the shares of the capacities, and what clients compute is not known.
"""

from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch import nn

from fedrolex.cli.arguments import read_inputs
from fedrolex.clients import MODEL, Job, Network
from fedrolex.methods.workload import Visits, expected_visits, is_counted, network_scale, visits, who_trains
from fedrolex.recipes.images import SHAPES, ImagesRecipe
from fedrolex.recipes.recipe import Recipe
from fedrolex.recipes.words import WordsRecipe
from fedrolex.rounds import Server
from fedrolex.slicing import trace
from fedrolex.tasks import Examples, Task
from fedrolex.theory.costs import cost

Made = TypeVar("Made")
IMAGES = {"cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000)}
"""Images to train and to test with, as many of every class."""

NO_MODEL = {"partition", "augment", "padding", "standardise", "validation", "public", "limit", "word_list", "sentences",
            "fewest", "test_users", "test_sentences"}  # fmt: skip
"""Settings of a task that change no model."""


@dataclass(frozen=True)
class Needed:
    """What a run needs; None where that cannot be said without its data or without training.

    Attributes:
        bytes: sent in both directions.
        macs: multiply-accumulates of all clients, forward and backward.
    """

    bytes: int | None
    macs: int | None


ONE = Examples(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
NO_DATA = Task.split(lambda _: nn.Identity(), ONE, ONE, clients=1)
"""What a server here has in place of a task."""


class PaperCosts:
    """Counts runs; what several of them share is made once."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def needed(self, recipe: Recipe) -> Needed:
        """What a run needs; nothing is known of methods that send more than the parts of one network."""
        task = recipe.task
        known = isinstance(task, WordsRecipe) or (isinstance(task, ImagesRecipe) and task.data in SHAPES)
        if not known or not is_counted(recipe.method) or recipe.fleet.stragglers or recipe.fleet.balanced:
            return Needed(None, None)
        server = self._server(recipe)
        every = self._visits(recipe, server)
        if every is None:
            return Needed(None, None)
        sizes = {parts: sum(server.bytes(_job(server, width)) for width in parts) for _, parts in every}
        sent = sum(2 * times * sizes[parts] for (_, parts), times in every.items())
        return Needed(round(sent), self._computed(recipe, server, every))

    # --- the network ---

    def _server(self, recipe: Recipe) -> Server:
        """The server of a run, without data."""
        scale = network_scale(recipe.method, recipe.fleet.server_scale)
        network = self._once(("network", *_model_key(recipe), scale), lambda: _network(recipe, scale))
        state = self._once(("state", id(network)), lambda: network.axes.state(network.module))
        fleet = recipe.fleet.build(recipe.seed, recipe.fleet.expected)
        server = Server(
            NO_DATA, fleet, {MODEL: network}, recipe.seed, recipe.fleet.server_scale, state={MODEL: dict(state)}
        )
        server.scheme = recipe.method.windows(server)
        return server

    def _computed(self, recipe: Recipe, server: Server, every: Visits) -> int | None:
        """Multiply-accumulates of all clients, as a run counts them: backward is twice forward."""
        task = recipe.task
        if not isinstance(task, ImagesRecipe) or task.data not in IMAGES or task.validation or task.limit:
            return None
        if isinstance(task.public, float) and task.public:
            return None
        held = self._once(
            ("held", task.data, repr(task.partition), repr(server.fleet), server.scale),
            lambda: _held(task, server),
        )
        forward = {width: self._forward(recipe, server, width) for _, parts in every for width in parts}
        passes = 3 * recipe.client.epochs
        return round(
            sum(
                passes * times * held[client] * sum(forward[width] for width in parts)
                for (client, parts), times in every.items()
            )
        )

    def _forward(self, recipe: Recipe, server: Server, width: Fraction) -> int:
        """Of one example."""
        network = server.main
        rounding: Any = getattr(recipe.method, "rounding", "floor")

        def count() -> int:
            return cost(network.module, network.axes, width, read_inputs([], network.module), rounding).macs

        return self._once(("forward", id(network), width, rounding), count)

    def _visits(self, recipe: Recipe, server: Server) -> Visits | None:
        """Who trains how much how often in all rounds; None where it depends on how many users the data has."""
        method, rounds = recipe.method, recipe.rounds
        if recipe.fleet.clients is None:
            return expected_visits(method, server, rounds)
        key = ("visits", *who_trains(method), *_model_key(recipe), repr(server.fleet), server.scale, rounds)
        return self._once(key, lambda: visits(method, server, rounds))

    def _once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found


def _network(recipe: Recipe, scale: int) -> Network:
    model = recipe.task.make_model(scale)
    return Network(model, trace(model, read_inputs([], model), whole=True).freeze(*recipe.task.frozen_axes()))


def _model_key(recipe: Recipe) -> tuple[Hashable, ...]:
    """What a task's model depends on: of text only the settings, of images the data, too, which have the classes."""
    idle = NO_MODEL | ({"data"} if isinstance(recipe.task, WordsRecipe) else set())
    return tuple(repr(item) for item in asdict(recipe.task).items() if item[0] not in idle)


def _job(server: Server, width: Fraction) -> Job:
    return Job(0, width, server.window(0, width))


def _held(task: ImagesRecipe, server: Server) -> list[int]:
    """How many images every client trains on, which depends on how many a class has, not on which they are."""
    classes, fleet = SHAPES[task.data][0], server.fleet
    train, test = (torch.arange(count) % classes for count in IMAGES[task.data])
    parts, _ = task.partition.split(train, test, classes, fleet, server.scale, fleet.seed)
    return [len(part) for part in parts]
