"""From ties to axes: name what is left free, decide what stays whole, turn everything into plain data."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor

from fedrolex.core import FedrolexError
from fedrolex.slicing.axis import Axis, Kind, Note, Role, TensorLayout, members_of
from fedrolex.slicing.infer import Concat, Dim, Product, Unknown, find, freeze, parts_of, unify, unknowns
from fedrolex.slicing.layout import Cat, Fixed, Layout, Prod, Ref, has_axis
from fedrolex.slicing.program import Change, Scale
from fedrolex.slicing.rules import Call, Traced
from fedrolex.slicing.rules.call import ToTheEnd
from fedrolex.slicing.scales import width_origin
from fedrolex.slicing.walk import Scalar, Ties

END = 2**63 - 1
Scaling = Literal["own-width", "keep", "all"]


class Resolution:
    """Axes under construction: leaves get a kind and a name, tensors their layouts.

    Args:
        ties: what walking the graphs found.
        roles: tensor name to ``parameter``, ``buffer`` or ``constant``, in the model's order.
        tensors: the tensors themselves.
        names: ``tensor:dim`` pattern or derived axis name to the name wanted.
        kinds: axis name to the kind wanted.
    """

    def __init__(
        self,
        ties: Ties,
        roles: Mapping[str, Role],
        tensors: Mapping[str, Tensor],
        names: Mapping[str, str],
        kinds: Mapping[str, Kind],
    ) -> None:
        self.ties = ties
        self.roles = roles
        self.tensors = tensors
        self._freeze_the_rest()
        self.kinds = self._kinds()
        self.names = self._names(names)
        known = {name: leaf for leaf, name in self.names.items()}
        for name, kind in kinds.items():
            if name not in known:
                raise FedrolexError(f"no axis {name!r} to give a kind; the axes are: {', '.join(known)}")
            self.kinds[known[name]] = kind

    def _dims(self) -> Iterable[tuple[str, int, Dim]]:
        for name in self.roles:
            for place, dim in enumerate(self.ties.dims[name]):
                yield name, place, dim

    def _leaves(self) -> dict[Unknown, list[tuple[str, int]]]:
        found: dict[Unknown, list[tuple[str, int]]] = {}
        for name, place, dim in self._dims():
            for leaf in dict.fromkeys(unknowns(dim)):
                found.setdefault(leaf, []).append((name, place))
        return found

    def _freeze_the_rest(self) -> None:
        for _, _, dim in self._dims():
            for factors in _products(dim):
                times = Counter(leaf for factor in factors for leaf in set(factor))
                for leaf in (leaf for leaf, n in times.items() if n > 1):
                    freeze(leaf, "it would be cut more than once in one dimension")
        for leaf, members in self._leaves().items():
            real = [m for m in members if self.tensors[m[0]].is_floating_point()]
            if leaf.size == 1:
                freeze(leaf, "size one")
            elif len(real) < 2 and not leaf.uses & {"rows", "outputs"}:
                freeze(leaf, "only one tensor has it, so nothing says what its indices mean")

    def _kinds(self) -> dict[Unknown, Kind]:
        kinds: dict[Unknown, Kind] = {}
        order: tuple[Kind, ...] = ("rows", "outputs", "heads", "groups")
        for leaf in self._leaves():
            if leaf.frozen is None:
                kinds[leaf] = next((kind for kind in order if kind in leaf.uses), "width")
        for _, _, dim in self._dims():
            for factors in _products(dim):
                cut = [[leaf for leaf in factor if kinds.get(leaf) == "width"] for factor in factors]
                largest = max(cut, key=lambda leaves: max((leaf.size for leaf in leaves), default=0))
                for leaf in (leaf for leaves in cut if leaves is not largest for leaf in leaves):
                    kinds[leaf] = "factor"
        return kinds

    # --- names ---

    def _names(self, wanted: Mapping[str, str]) -> dict[Unknown, str]:
        result: dict[Unknown, str] = {}
        unmatched = set(wanted)
        nameless = next((pattern for pattern, name in wanted.items() if not name), None)
        if nameless is not None:
            raise FedrolexError(f"the name for {nameless!r} is empty: give the axis a name")
        members = self._leaves()
        for leaf in self.kinds:
            base = self._base_name(leaf, members[leaf])
            given = [p for p in wanted if base == p or any(fnmatchcase(f"{t}:{d}", p) for t, d in members[leaf])]
            unmatched -= set(given)
            base = wanted[given[0]] if given else base
            name, number = base, 2
            while name in result.values():
                name, number = f"{base}.{number}", number + 1
            result[leaf] = name
        if unmatched:
            first = min(unmatched)
            raise FedrolexError(f"no axis matches {first!r}: name axes by 'tensor:dimension', e.g. 'conv1.weight:0'")
        return result

    def _base_name(self, leaf: Unknown, members: Sequence[tuple[str, int]]) -> str:
        """A name after the first tensor that writes the axis; a part of a dimension adds what the part is."""
        layers = {tensor for tensor, _ in self.ties.reads}
        writers = [m for m in members if m not in self.ties.reads and self.roles[m[0]] == "parameter"]
        tensor, dim = ([m for m in writers if m[0] in layers] or writers or list(members))[0]
        base = tensor
        for ending in (".weight", "_weight", ".bias", "_bias"):
            base = base.removesuffix(ending)
        pure = any(find(self.ties.dims[t][d]) is leaf for t, d in members)
        if self.kinds[leaf] in ("rows", "heads", "groups"):
            return f"{base}.{self.kinds[leaf]}"
        if pure or isinstance(find(self.ties.dims[tensor][dim]), Unknown):
            return base
        return f"{base}.{''.join(use for use in ('qk', 'v') if use in leaf.uses) or 'part'}"

    # --- plain data ---

    def layout(self, dim: Dim) -> Layout:
        """The plain layout of a dimension."""
        dim = find(dim)
        if isinstance(dim, Unknown):
            return Ref(self.names[dim]) if dim in self.names and dim.frozen is None else Fixed(dim.size)
        return _simplified([self.layout(part) for part in dim.parts], isinstance(dim, Product))

    def tensor_layouts(self) -> dict[str, TensorLayout]:
        """Layouts of all tensors, in the model's order."""
        found = {}
        for name, role in self.roles.items():
            dims = tuple(self.layout(dim) for dim in self.ties.dims[name])
            reads = tuple(d for d in range(len(dims)) if (name, d) in self.ties.reads)
            found[name] = TensorLayout(dims, role, reads, self.tensors[name].is_floating_point())
        return found

    def axes(self, layouts: Mapping[str, TensorLayout]) -> dict[str, Axis]:
        """All axes, in the model's order."""
        members = members_of(layouts)
        by_name = {name: leaf for leaf, name in self.names.items()}
        return {n: Axis(n, by_name[n].size, self.kinds[by_name[n]], pairs) for n, pairs in members.items()}

    def frozen(self) -> list[Note]:
        """Dimensions wider than one of parameters that stay whole, and why."""
        notes = []
        for name, place, dim in self._dims():
            if self.roles[name] != "parameter":
                continue
            leaves = list(unknowns(dim))
            partly = any(leaf.frozen is None for leaf in leaves)
            for leaf in leaves:
                if leaf.frozen is not None and leaf.size > 1:
                    what = f"{leaf.frozen} (a part or factor of {leaf.size})" if partly else leaf.frozen
                    notes.append(Note(f"{name}:{place}", what))
        return list(dict.fromkeys(notes))

    def changes(self, edits: Mapping[str, Call]) -> dict[str, Change]:
        """The edits of one walk with layouts in place of dimensions."""
        result = {}
        for node, edit in edits.items():
            if edit.replace is not None:
                operator, arguments = edit.replace
                result[node] = Change({k: self._value(v) for k, v in arguments.items()}, operator)
            else:
                result[node] = Change({k: self._value(v) for k, v in edit.rewrite.items() if self._matters(v)})
        return result

    def _matters(self, value: Any) -> bool:
        """A slice to the end of a dimension that is never cut stays as the graph has it."""
        return not isinstance(value, ToTheEnd) or has_axis(self.layout(value.dim))

    def _value(self, value: Any) -> Any:
        if isinstance(value, Traced):
            return None
        if isinstance(value, ToTheEnd):
            return END
        if isinstance(value, list):
            return [self._value(item) for item in value]
        return self.layout(value) if isinstance(value, Unknown | Product | Concat) else value

    def scales(self, scalars: Sequence[Scalar], scaling: Scaling) -> list[Scale]:
        """The numbers of one walk that are a power of an axis' size."""
        found = [(one, width_origin(one, scalars, self.kinds)) for one in scalars]
        return [
            Scale(one.node, one.argument, one.value, self.layout(of.dim), of.power, _follows(of.sure, scaling))
            for one, of in found
            if of is not None
        ]


def _follows(sure: bool, scaling: Scaling) -> bool:
    return scaling == "all" or (sure and scaling == "own-width")


def _products(dim: Dim) -> Iterable[list[list[Unknown]]]:
    """For every product below ``dim``, the leaves of each of its factors."""
    return ([list(unknowns(part)) for part in p.parts] for p in parts_of(dim) if isinstance(p, Product))


def _simplified(parts: Sequence[Layout], product: bool) -> Layout:
    """The product of layouts, or the layouts one after the other, with neighbours that stay whole taken together."""
    merged: list[Layout] = []
    for part in parts:
        if isinstance(part, Fixed) and merged and isinstance(merged[-1], Fixed):
            merged[-1] = Fixed(merged[-1].size * part.size if product else merged[-1].size + part.size)
        elif not product or part != Fixed(1):
            merged.append(part)
    if len(merged) < 2:
        return merged[0] if merged else Fixed(1)
    return Prod(tuple(merged)) if product else Cat(tuple(merged))


def apply_overrides(
    ties: Ties, roles: Mapping[str, Role], freeze_patterns: Iterable[str], tie: Iterable[Sequence[str]]
) -> None:
    """What the user or the model says about its axes, before anything is decided.

    ``freeze`` patterns match ``tensor`` or ``tensor:dim``; ``tie`` lists ``tensor:dim`` that must share indices.
    """
    every = {f"{name}:{place}": dim for name in roles for place, dim in enumerate(ties.dims[name])}
    for pattern in freeze_patterns:
        matched = [d for k, d in every.items() if any(fnmatchcase(s, pattern) for s in (k, k.rpartition(":")[0]))]
        if not matched:
            raise FedrolexError(f"nothing matches freeze={pattern!r}: give 'tensor' or 'tensor:dimension', * allowed")
        for dim in matched:
            freeze(dim, "frozen on request")
    for group in tie:
        for key in group:
            if key not in every:
                raise FedrolexError(f"tie names {key!r}, which is not a 'tensor:dimension' of this model")
            unify(every[group[0]], every[key])
