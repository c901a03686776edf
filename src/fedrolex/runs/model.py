"""The models that come of a run, as they were measured: given, written at its end, read again."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from fedrolex.core import FedrolexError
from fedrolex.core.threads import spread_over, threads_for
from fedrolex.methods import Method
from fedrolex.models import OFFSETS, WithOffsets, static_norms, with_statistics
from fedrolex.models.norms import Moments
from fedrolex.rounds import Server
from fedrolex.rounds.finite import not_finite
from fedrolex.runs import checkpoint
from fedrolex.runs.hooks import calling
from fedrolex.runs.training import Training
from fedrolex.slicing import Capacity, exact
from fedrolex.tasks import Measure


@dataclass(frozen=True)
class Models:
    """Gives the model of a run that is judged, and the sub-models of its capacities.

    Where statistics are recalibrated, every model has those of its own static norms, of the same training examples. All
    are in evaluation mode and in memory of their own.
    """

    server: Server
    method: Method
    measure: Measure

    @classmethod
    def of(cls, training: Training) -> Self:
        """The models of a training where it stands."""
        return cls(training.judged, training.method, training.measure)

    def __call__(self, capacity: Capacity | None = None) -> nn.Module:
        """The model that is judged or, of a capacity, the sub-model, as it is measured."""
        server, measure = self.server, self.measure
        with spread_over(threads_for(server.parameters)):
            if capacity is None:
                with calling(self.method, "measured"):
                    found = self.method.measured(server, measure)
                    if not isinstance(found, nn.Module):
                        raise TypeError("it must return a module")
            else:
                found = measure.ready(server.task, self._bare(capacity))
        return copy.deepcopy(found).eval()

    def write(self, folder: Path) -> dict[str, str]:
        """Write the model that is judged into a run's folder and, where sub-models are measured, those.

        Returns their checksums by file name, for :meth:`read`.
        """
        levels = self.method.sizes(self.server) if self.measure.submodels else []
        parts = [level for level in levels if self.method.submodel(self.server, level) is not None]
        written = {}
        for level in (None, *parts):
            path = path_of(folder, level)
            tensors = {name: tensor.clone() for name, tensor in _tensors(self(level)).items()}  # tied ones apart
            written[path.name] = checkpoint.write(path, tensors, {"round": str(self.server.round)})
        return written

    def read(
        self, folder: Path, capacity: Capacity | None = None, written: Mapping[str, str] | None = None
    ) -> nn.Module | None:
        """A model as it was written into a run's folder; None where there is none of the round the server is at.

        Refused where its checksum is not the one in ``written``, which may hold none: older runs kept none.
        """
        path = path_of(folder, capacity)
        if not path.is_file():
            return None
        tensors, about = checkpoint.read(path)
        if about.get("round") != str(self.server.round):
            return None
        if (written or {}).get(path.name) not in (None, checkpoint.checksum(tensors, about)):
            remedy = f"put it back, or have it written again with: fedrolex resume {folder}"
            raise FedrolexError(f"{path} is not the model that this run wrote: {remedy}")
        refusal = f"{path} does not fit the run's model"
        return filled(self._bare(capacity), tensors, _tensors, self.server.task.classes, refusal)

    def _bare(self, capacity: Capacity | None) -> nn.Module:
        """The model that is judged or, of a capacity, the sub-model, without statistics."""
        if capacity is None:
            with calling(self.method, "judged"):
                return self.method.judged(self.server)
        level, levels = exact(capacity), self.method.sizes(self.server)
        if level not in levels:
            raise FedrolexError(f"no client trains capacity {capacity}: give one of {', '.join(map(str, levels))}")
        with calling(self.method, "submodel"):
            found = self.method.submodel(self.server, level)
        if found is None:
            raise FedrolexError(f"{self.method.name} has no sub-models to give, only its model")
        return found


def path_of(folder: Path, capacity: Capacity | None = None) -> Path:
    """The file of a run's model, or of the sub-model of a capacity."""
    name = "model" if capacity is None else f"submodel-{exact(capacity)}".replace("/", "-")
    return folder / f"{name}.safetensors"


def filled(
    bare: nn.Module,
    tensors: Mapping[str, Tensor],
    named: Callable[[nn.Module], Mapping[str, Tensor]],
    classes: int,
    refusal: str,
) -> nn.Module:
    """A copy of a model, in evaluation mode, with the tensors of a file; refused unless they are just its own.

    Args:
        bare: without the statistics that its static norms, and the offsets that its classes, have in the file.
        tensors: by name; ``named`` gives a model's of the same names.
        classes: how many scores it gives.
        refusal: how the line begins that refuses them.
    """
    if OFFSETS in tensors and all(f"model.{name}" in tensors for name in named(bare)):
        like = next(bare.parameters(), torch.zeros(0))
        kind = torch.promote_types(like.dtype, torch.float32)
        bare = WithOffsets(bare, torch.zeros(classes, dtype=kind, device=like.device))
    has = [n for n in static_norms(bare) if f"{n}.running_mean" in tensors and f"{n}.running_var" in tensors]
    found = {n: Moments(0, tensors[f"{n}.running_mean"], tensors[f"{n}.running_var"]) for n in has}
    model = with_statistics(bare, found) if found else copy.deepcopy(bare).eval()
    own = named(model)
    kinds = [{name: (t.shape, t.dtype) for name, t in each.items()} for each in (own, tensors)]
    wrong = [name for name in {**own, **tensors} if kinds[0].get(name) != kinds[1].get(name)]
    wrong = wrong or [name for name in own if not_finite({name: tensors[name]})]
    if wrong:
        raise FedrolexError(f"{refusal}: look at tensor {wrong[0]!r}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    return model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
