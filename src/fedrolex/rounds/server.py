"""The server's side of a run: what is trained, by whom, and the tensors it stands at."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod

import torch
from torch import Tensor, nn

from fedrolex.clients import MODEL, Job, Network, Tensors, copied
from fedrolex.core import FedrolexError
from fedrolex.core.operations import macs_of
from fedrolex.rounds.client_states import ClientStates
from fedrolex.rounds.fleet import Fleet
from fedrolex.slicing import Scheme, Static, Window
from fedrolex.tasks import Classification, Task

State = dict[str, dict[str, Tensor]]
"""The server's tensors: by section, then by name."""


@dataclass
class Server:
    """What a method sees of a run.

    Attributes:
        task, fleet: what is learned, and by whom.
        networks: the models that clients train; :data:`MODEL` is the main one.
        seed: of all random streams.
        scale: how many times wider the server's model is than the task's.
        scheme: which nodes of the main network a client trains.
        state: the server's tensors. A network's tensors are in the section of its name; a method adds sections.
        round: the next round, counted from 0.
        clients: what clients keep between rounds, where the method needs it.
        view: the task as clients see it.
    """

    task: Task
    fleet: Fleet
    networks: Mapping[str, Network]
    seed: int = 0
    scale: int = 1
    scheme: Scheme = field(default_factory=Static)
    state: State = field(default_factory=dict)
    round: int = 0
    clients: ClientStates | None = None

    def __post_init__(self) -> None:
        self.view: Task = self.task
        self._bytes: dict[tuple[object, ...], int] = {}
        self._macs: dict[tuple[object, ...], int | None] = {}
        for name, network in self.networks.items():
            self.state.setdefault(name, copied(network.axes.state(network.module)))

    @property
    def main(self) -> Network:
        """The main network."""
        return self.networks[MODEL]

    @property
    def parameters(self) -> int:
        """How many parameters the largest network has."""
        return max(sum(p.numel() for p in network.module.parameters()) for network in self.networks.values())

    @property
    def device(self) -> torch.device:
        """Where the server's tensors are."""
        return next(iter(self.state[MODEL].values())).device

    def trainable(self, network: str = MODEL) -> list[str]:
        """Names of the parameters of a network that training changes."""
        known = self.state[network]
        return [n for n, p in self.networks[network].module.named_parameters() if p.requires_grad and n in known]

    def window(self, round: int, capacity: Fraction, client: int = 0) -> Window:
        """Which nodes of the main network a client of a capacity trains in a round."""
        return self.scheme.window(self.main.axes, round=round, capacity=capacity, client=client)

    def tensors(self, *sections: str) -> dict[str, Tensor]:
        """The tensors of sections together; where two have the same name, the later section's."""
        return {name: tensor for section in sections for name, tensor in self.state[section].items()}

    def loaded(self, *sections: str, network: str = MODEL) -> nn.Module:
        """A network's module with the tensors of these sections."""
        found = self.networks[network]
        found.axes.load(found.module, self.tensors(*(sections or (network,))))
        return found.module

    def bytes(self, job: Job) -> int:
        """The size of a job's part of its network: parameters and buffers, in their precision."""
        axes = self.networks[job.network].axes
        key, widths = self._key(job)
        if key not in self._bytes:
            whole = self.tensors(*job.sections)
            self._bytes[key] = sum(prod(axes.shape(n, widths)) * t.element_size() for n, t in whole.items())
        return self._bytes[key]

    def macs(self, job: Job) -> int | None:
        """Multiply-accumulates of a job's sub-model on one example, forward; None where it cannot be counted."""
        key, _ = self._key(job)
        if key not in self._macs:
            self._macs[key] = self._counted(job)
        return self._macs[key]

    def _key(self, job: Job) -> tuple[tuple[object, ...], Mapping[str, int]]:
        """What the sizes of a job's tensors depend on, and the width of every axis."""
        widths = self.networks[job.network].axes.widths(job.window)
        return (job.network, *widths.values()), widths

    def _counted(self, job: Job) -> int | None:
        network, x = self.networks[job.network], self.view.example().to(self.device)
        try:
            with torch.random.fork_rng(devices=[]):  # a new module draws weights
                module = network.axes.cut(network.module, job.window).to(self.device).eval()
            return macs_of(lambda: module(x)) // len(x)
        except Exception:  # a model of one's own may need more than the example to be called
            return None

    @property
    def classification(self) -> Classification:
        """The task, which is one of classes."""
        if not isinstance(self.task, Classification):
            raise FedrolexError(f"this method compares scores of classes, not those of {self.task.name}")
        return self.task


def flat(state: State) -> dict[str, Tensor]:
    """A state as one mapping, ``section:name`` to tensor, as in checkpoints."""
    return {f"{section}:{name}": tensor for section, tensors in state.items() for name, tensor in tensors.items()}


def sections(tensors: Tensors) -> State:
    """The inverse of :func:`flat`."""
    state: State = {}
    for key, tensor in tensors.items():
        section, colon, name = key.partition(":")
        if not colon:
            raise FedrolexError(f"tensor {key!r} is in no section")
        state.setdefault(section, {})[name] = tensor
    return state
