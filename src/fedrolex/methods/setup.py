"""What a method makes its networks from."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedrolex.clients import LocalTraining, Network
from fedrolex.core import in_one_line, random_words
from fedrolex.rounds import Fleet
from fedrolex.slicing.traced_once import traced_once
from fedrolex.tasks import Measure, Task

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setup:
    """A run before its first round.

    Attributes:
        task: with its data on the device.
        fleet: who learns it; capacities are parts of the server's model.
        client: what clients do, before the method changes it.
        scale: how many times wider the server's model is than the task's.
        seed: of all random streams.
        device: where networks are put.
        deadline: seconds a client may take, or None.
        measure: how the model will be evaluated.
    """

    task: Task
    fleet: Fleet
    client: LocalTraining
    scale: int = 1
    seed: int = 0
    device: torch.device = CPU
    deadline: float | None = None
    measure: Measure = field(default_factory=Measure)

    def network(
        self, build: Callable[[], nn.Module], *key: str, example: Tensor | None = None, whole: bool = False
    ) -> Network:
        """A network with random weights.

        Args:
            build: makes the module, with weights from torch's random state.
            key: of the stream that weights are drawn from.
            example: an input to trace the module with; by default the task's, and then the module's outputs must be
                what the task's loss takes.
            whole: take a module that nothing can be cut from, too.
        """
        with torch.random.fork_rng(devices=[]), in_one_line("the model cannot be made"):
            torch.manual_seed(int(random_words(1, self.seed, *key)[0] >> 1))
            module = build()
        axes = traced_once(module, self.task.example().cpu() if example is None else example, whole=whole)
        if example is None:
            self.task.check_model(module)
        return Network(module.to(self.device), axes.freeze(*self.task.frozen))
