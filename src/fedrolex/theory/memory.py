"""What training takes: the memory of one step of a sub-model, measured by taking the step.

Weights, gradients and the optimiser's memory follow from the parameters. What forward saves for backward is seen by
hooks on saved tensors, temporaries by looking at every operation. Counted are tensors alone: the program around
them, and what a library keeps for itself, come on top.
"""

import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedrolex.core import FedrolexError, in_one_line, one_of
from fedrolex.slicing.inputs import Inputs

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2}
"""How many tensors of the parameters' size each remembers."""

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one training step.

    Attributes:
        parameters: how many there are.
        weights: of the parameters and buffers.
        gradients: of what is trained.
        optimizer: what the optimiser remembers from step to step.
        activations: what forward saves for backward, inputs too.
        temporary: the most that one operation of backward or the optimiser makes; or what the step takes at its peak
            beyond all of the above, where that is more.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int

    @property
    def total(self) -> int:
        """Bytes at the step's peak."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary


def training_memory(module: nn.Module, inputs: Inputs, batch: int, optimizer: str = "sgd") -> StepMemory:
    """The memory of one step: forward, a cross-entropy of the first output, backward, the optimiser.

    The total is never below what the step took at its peak, nor below all its parts together.

    Args:
        module: a model or sub-model, on the CPU; its weights are changed.
        inputs: how it is called.
        batch: examples of the step.
        optimizer: one of :data:`OPTIMIZERS`.
    """
    one_of("optimizer", optimizer, list(OPTIMIZERS))
    if type(batch) is not int or batch < 1:
        raise FedrolexError(f"batch is {batch!r}: give a whole number of at least 1")
    values = [_rows(value, batch) for value in inputs.values]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    held = _storages([*module.parameters(), *module.buffers()])
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    remembered = OPTIMIZERS[optimizer] * gradients
    step = _optimizer(optimizer, trained)
    live, saved = _Live(), dict[int, int]()

    def see(tensor: Tensor) -> Tensor:
        saved.update(_storages([tensor]))
        return tensor

    with in_one_line("a training step of the model failed"), torch.enable_grad(), live:
        with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
            loss = _loss(inputs.call(module.train(), values))
        live.largest = 0
        loss.backward()
        peak, live.peak = live.peak + remembered, live.now
        step.step()
        peak = max(peak, live.peak)
    activations = sum(size for storage, size in saved.items() if storage not in held)
    peak += sum(_storages(values).values())
    temporary = max(live.largest, peak - activations - gradients - remembered)
    count = sum(parameter.numel() for parameter in module.parameters())
    return StepMemory(count, sum(held.values()), gradients, remembered, activations, temporary)


def _loss(outputs: Any) -> Tensor:
    """A cross-entropy of the first output: the mean over all but its last dimension."""
    first = next(leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor))
    return -first.float().log_softmax(-1)[..., 0].mean()


def _optimizer(name: str, trained: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(trained, foreach=True)
    return torch.optim.SGD(trained, lr=1e-3, momentum=0.9 if name == "momentum" else 0, foreach=True)


def _rows(value: Tensor, batch: int) -> Tensor:
    """An example's rows, over and over, as many as a batch has."""
    return value if not value.dim() else value[torch.arange(batch) % len(value)]


def _storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Bytes by storage: tensors that share memory count once."""
    every = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in every}


class _Live(TorchDispatchMode):
    """While the mode is entered, counts the bytes of tensors that were made in it and are still there.

    Attributes:
        now: at this moment.
        peak: at most, so far.
        largest: what one operation made, at most.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.largest = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation as it is, and count the bytes of what it made."""
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._note(tensor, 0)  # was there before
        before = self.now
        outputs = func(*args, **kwargs)
        for tensor in _tensors(outputs):
            self._note(tensor, tensor.untyped_storage().nbytes())
        self.largest = max(self.largest, self.now - before)
        self.peak = max(self.peak, self.now)
        return outputs

    def _note(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self.now += size
            self._known[key] = weakref.ref(storage, lambda _: self._gone(key)), size

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key)[1]


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def in_bytes(text: str) -> int:
    """A size in words, ``512MB`` or ``1.5 GiB``, in bytes; without a unit, of bytes."""
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(found[2].upper().removesuffix("B")) if found else None
    if found is None or unit is None or not (size := int(float(found[1]) * unit)):
        raise FedrolexError(f"{text!r} is no size of a memory: give e.g. 512MB, 1.5GB or 256MiB")
    return size
