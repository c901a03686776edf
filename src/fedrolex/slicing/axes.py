"""The axes of a model: which dimensions of which tensors are always cut together.

:class:`Axes` is plain data (see :meth:`Axes.encode`): a server and its clients cut, paste and fold with it,
without the model's code and without the graph it was derived from.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn

from fedrolex.core import FedrolexError
from fedrolex.core.errors import did_you_mean
from fedrolex.slicing import layout as layouts
from fedrolex.slicing.axis import KINDS, Axis, Note, Role, TensorLayout, members_of
from fedrolex.slicing.layout import Fixed, Layout
from fedrolex.slicing.regions import Region, region_of
from fedrolex.slicing.windows import WHOLE, Capacity, Rounding, Window, exact, width

FORMAT = 1
REMEMBERED = 2**14
WINDOW = "slicing_window"  # where a sub-model has the window it was cut by, as plain data

Tensors = Mapping[str, Tensor]


class Builder(Protocol):
    """Makes the smaller module; its ``constants`` are tensors that belong to the code, not to the state."""

    @property
    def constants(self) -> Tensors: ...

    def __call__(self, widths: Mapping[str, int], constants: Tensors, /) -> nn.Module: ...


@dataclass(frozen=True, eq=False)
class Axes:
    """The axes of one model, and everything that is cut along them.

    Attributes:
        axes: by name, in the model's order.
        tensors: layouts by tensor name; tied tensors once, under their first name.
        aliases: other names of tied tensors.
        frozen: dimensions that stay whole although they are wider than one, and why.
        notes: width-derived numbers, unknown operators, limits.
        build: makes the smaller module for given widths (from the traced graph, or the model's factory);
            None after :meth:`decode`.
    """

    axes: Mapping[str, Axis]
    tensors: Mapping[str, TensorLayout]
    aliases: Mapping[str, str] = field(default_factory=dict)
    frozen: tuple[Note, ...] = ()
    notes: tuple[Note, ...] = ()
    build: Builder | None = None
    _regions: dict[tuple[str, Window, bool], Region] = field(default_factory=dict, init=False, repr=False)

    # --- sizes ---

    @cached_property
    def full(self) -> dict[str, int]:
        """Full size of every axis."""
        return {name: axis.size for name, axis in self.axes.items()}

    @cached_property
    def _whole_shapes(self) -> dict[str, torch.Size]:
        return {name: torch.Size(self.shape(name)) for name in self.tensors}

    @cached_property
    def cut_axes(self) -> tuple[Axis, ...]:
        """The axes that capacities cut, in order."""
        return tuple(axis for axis in self.axes.values() if axis.kind == "width")

    def widths(self, of: Window | Capacity, rounding: Rounding = "floor") -> dict[str, int]:
        """Size of every axis in a window, or at a capacity."""
        if isinstance(of, Window):
            self._check(of)
            return {name: of[name].width if name in of else axis.size for name, axis in self.axes.items()}
        beta = exact(of)
        return {name: width(a.size, beta, rounding) if a.kind == "width" else a.size for name, a in self.axes.items()}

    def shape(self, tensor: str, widths: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """Shape of a tensor at these widths (full by default)."""
        return layouts.shape(self.layout(tensor).dims, widths or self.full)

    def layout(self, tensor: str) -> TensorLayout:
        """The layout of a tensor by name."""
        if tensor not in self.tensors:
            raise FedrolexError(f"the model has no tensor {tensor!r}{did_you_mean(tensor, list(self.tensors))}")
        return self.tensors[tensor]

    def counted(self, tensor: str) -> tuple[Layout, ...]:
        """The dimensions of a tensor's counts: one long where there is no axis, since counts are equal there."""
        return tuple(dim if layouts.has_axis(dim) else Fixed(1) for dim in self.layout(tensor).dims)

    def parameters(self, of: Window | Capacity = "1", rounding: Rounding = "floor") -> int:
        """Number of parameters of the sub-model for a window or at a capacity."""
        widths = self.widths(of, rounding)
        return sum(prod(self.shape(name, widths)) for name, t in self.tensors.items() if t.role == "parameter")

    def __getitem__(self, name: str) -> Axis:
        """An axis by name."""
        if not isinstance(name, str) or name not in self.axes:
            near = difflib.get_close_matches(str(name), self.axes, 1)
            some = ", ".join([*self.axes][:12]) + (", …" if len(self.axes) > 12 else "")
            said = f"did you mean {near[0]!r}?" if near else f"the axes are: {some}"
            raise FedrolexError(f"no axis {name!r}; {said}")
        return self.axes[name]

    def __repr__(self) -> str:
        return f"<Axes: {len(self.cut_axes)} cut of {len(self.axes)}, {self.parameters():,} parameters>"

    def _check(self, window: Window) -> None:
        if not isinstance(window, Window):
            remedy = "make one with a scheme, e.g. Rolling().window(axes, round=0, capacity='1/4')"
            raise FedrolexError(f"window is a {type(window).__name__}: {remedy}")
        for name in window:
            if name not in self.axes:
                near = did_you_mean(name, list(self.axes))
                raise FedrolexError(f"window names axis {name!r}, which this model does not have{near}")
            if window[name].size != (size := self.axes[name].size):
                raise FedrolexError(f"window takes axis {name!r} for one of {window[name].size} indices; it has {size}")

    # --- tensors: take a window out, put one back ---

    def state(self, module: nn.Module, window: Window = WHOLE) -> dict[str, Tensor]:
        """The tensors of the model, or of its sub-model for ``window``. They share memory with the module."""
        self._check(window)
        if not isinstance(module, nn.Module):
            raise FedrolexError(
                f"expected a module, got a {type(module).__name__}: tensors are cut with axes.take(state, window)"
            )
        own: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        wanted = [name for name, t in self.tensors.items() if t.role != "constant"]
        missing = next((name for name in wanted if name not in own), None)
        if missing is not None:
            raise FedrolexError(f"this module has no tensor {missing!r}: it is not the one that was traced")
        for name in wanted:
            self.fits(name, own[name], window)
        return {name: own[name].detach() for name in wanted}

    def region(self, tensor: str, window: Window, *, counts: bool = False) -> Region:
        """Where the elements of a window lie in ``tensor``, and where in its cut.

        With ``counts``, dimensions without an axis are taken as one long: see :class:`~fedrolex.slicing.fold.Fold`.
        """
        key = (tensor, window, counts)
        found = self._regions.get(key)
        if found is None:
            self._check(window)
            if len(self._regions) >= REMEMBERED:
                self._regions.clear()
            dims = self.counted(tensor) if counts else self.layout(tensor).dims
            found = self._regions[key] = region_of(tensor, dims, self.full, window)
        return found

    def take(self, state: Tensors, window: Window, out: Tensors | None = None) -> dict[str, Tensor]:
        """The window's part of every tensor of ``state``, as new tensors or copied into ``out``."""
        self._check(window)
        self.check_whole(state)
        if out is not None:
            own = check_named(out)
            for name in state:
                self.fits(name, own.get(name), window)
        with torch.no_grad():
            return {
                name: self.region(name, window).take(tensor, None if out is None else out[name])
                for name, tensor in state.items()
            }

    def put(self, state: Tensors, part: Tensors, window: Window) -> None:
        """Write a window's part back into ``state``, in place; everything else keeps its bits."""
        self._check(window)
        self.check_whole(state)
        for name, tensor in check_named(part).items():
            self.fits(name, tensor, window)
            self.fits(name, state.get(name), WHOLE)
        with torch.no_grad():
            for name, tensor in part.items():
                self.region(name, window).put(state[name], tensor)

    def check_whole(self, state: Tensors) -> None:
        """Raise unless ``state`` holds whole tensors of the model."""
        for name, tensor in check_named(state).items():
            whole = isinstance(tensor, Tensor) and tensor.shape == self._whole_shapes.get(name)
            if not whole or self._odd(name, tensor):
                self.fits(name, tensor, WHOLE)

    def _odd(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor has no values, or others than real numbers where the model's are."""
        if tensor.is_meta or tensor.layout is not torch.strided:
            return True
        return self.tensors[name].floating and not tensor.is_floating_point()

    def fits(self, name: str, tensor: object, window: Window) -> None:
        """Raise unless ``tensor`` has exactly the shape of the window's part of tensor ``name``."""
        self.layout(name)
        if not isinstance(tensor, Tensor):
            raise FedrolexError(f"{name} is a {type(tensor).__name__}, not a tensor (torch.from_numpy?)")
        wanted = self.region(name, window).shape
        if tuple(tensor.shape) != wanted:
            said = f"this window's part has {wanted}"
            said = said if window else f"the whole model's has {wanted} (a part? give its window)"
            raise FedrolexError(f"{name} has shape {tuple(tensor.shape)}; {said}")
        if self._odd(name, tensor):
            dense = not tensor.is_meta and tensor.layout is torch.strided
            what = f"holds {tensor.dtype}, not real numbers" if dense else "has no values of its own: send some"
            raise FedrolexError(f"{name} {what}")

    # --- modules ---

    def cut(self, model: nn.Module, window: Window) -> nn.Module:
        """A real, smaller module: the sub-network of ``model`` on the window's indices.

        It is in training mode, as every new module is.
        """
        if self.build is None:
            raise FedrolexError("these axes were loaded without a model: trace it, or give a factory, to build modules")
        self._check(window)
        state = self.state(model)
        module = self.build(self.widths(window), self.take(self.build.constants, window))
        _match(module, model)
        self.load(module, state, window)
        vars(module.train())[WINDOW] = window
        return module

    def load(self, module: nn.Module, state: Tensors, window: Window = WHOLE) -> None:
        """Copy the window's part of ``state`` into a module of these widths (by default the whole model)."""
        own = self.state(module, window)
        if not state:
            raise FedrolexError("nothing to load: the state is empty")
        self.take(state, window, out=own)

    def paste(self, model: nn.Module, part: nn.Module, window: Window) -> None:
        """Write a sub-model's tensors back into the model it was cut from, in place."""
        self.put(self.state(model), self.state(part, window), window)

    # --- choosing what is cut ---

    def freeze(self, *names: str) -> Axes:
        """The same axes with some kept whole in every capacity (they can still be selected from)."""
        for name in names:
            self[name]
        axes = {n: replace(a, kind="factor") if n in names else a for n, a in self.axes.items()}
        return replace(self, axes=axes)

    # --- plain data ---

    def encode(self) -> dict[str, Any]:
        """Everything but the module builder, as JSON data with a format version."""
        return {
            "format": FORMAT,
            "axes": {a.name: {"size": a.size, "kind": a.kind} for a in self.axes.values()},
            "tensors": {
                name: {**vars(t), "dims": [layouts.encode(dim) for dim in t.dims], "reads": list(t.reads)}
                for name, t in self.tensors.items()
            },
            "aliases": dict(self.aliases),
            "frozen": [[n.about, n.what] for n in self.frozen],
            "notes": [[n.about, n.what] for n in self.notes],
        }

    @staticmethod
    def decode(data: Mapping[str, Any]) -> Axes:
        """Inverse of :meth:`encode`; a newer format or damaged data is refused in one line."""
        data = data.get("layouts", data) if isinstance(data, Mapping) else data
        found = data.get("format") if isinstance(data, Mapping) else None
        if found != FORMAT:
            raise FedrolexError(f"axes have format {found!r}, this version reads {FORMAT}: update it, or trace again")
        try:
            tensors = {
                name: TensorLayout(
                    tuple(layouts.decode(d) for d in t["dims"]), t["role"], tuple(t["reads"]), t["floating"]
                )
                for name, t in data["tensors"].items()
            }
            members = members_of(tensors)
            axes = {n: Axis(n, a["size"], a["kind"], members.get(n, ())) for n, a in data["axes"].items()}
            unknown = sorted(set(members) - set(axes))
            odd = [a.name for a in axes.values() if a.kind not in KINDS or type(a.size) is not int or a.size < 1]
            odd += [name for name in axes if not isinstance(name, str)]
            if broken := unknown + odd:
                raise FedrolexError(f"axes data is damaged: axis {broken[0]!r} is missing, or lacks size or kind")
            for name, t in tensors.items():
                if (
                    t.role not in get_args(Role)
                    or type(t.floating) is not bool
                    or not set(t.reads) <= set(range(len(t.dims)))
                ):
                    raise FedrolexError(f"axes data is damaged: tensor {name!r} lacks its role, or what it reads")
            notes = {key: tuple(Note(about, what) for about, what in data[key]) for key in ("frozen", "notes")}
            return Axes(axes, tensors, dict(data["aliases"]), notes["frozen"], notes["notes"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, FedrolexError):
                raise
            raise FedrolexError(f"axes data is damaged: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled axes are plain data: they cut tensors, and need to be traced again to build modules."""
        return Axes.from_json, (self.to_json(),)

    def to_json(self) -> str:
        """:meth:`encode` as a JSON string."""
        return json.dumps(self.encode())

    @staticmethod
    def from_json(text: str) -> Axes:
        """Inverse of :meth:`to_json`; also reads what ``fedrolex slice --json`` printed."""
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise FedrolexError(f"not JSON: {error}") from error
        if not isinstance(data, dict):
            raise FedrolexError("not axes data: expected a JSON object")
        return Axes.decode(data)


def _match(module: nn.Module, model: nn.Module) -> None:
    """Give a new sub-model the dtype and device the model has now, and its frozen parameters."""
    first, now = next(iter(module.parameters()), None), next(iter(model.parameters()))
    if first is None:
        raise FedrolexError("the sub-model has no parameters: it is not one of the model that was traced")
    if (first.dtype, first.device) != (now.dtype, now.device):
        module.to(device=now.device, dtype=now.dtype)
    wants = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(wants.get(name, parameter.requires_grad))


def check_named(tensors: object) -> Tensors:
    """Tensors by name; raise, in one line, where they are not given so."""
    if not isinstance(tensors, Mapping):
        raise FedrolexError(f"state is a {type(tensors).__name__}: give tensors by name, e.g. axes.state(model)")
    return tensors
