"""Sub-models by any window scheme: a scheme of one's own is trained without writing a method."""

from dataclasses import dataclass, field, fields, is_dataclass

from fedrolex.core import SCHEMES, FedrolexError
from fedrolex.methods.averaging import Averaging
from fedrolex.methods.needs import Needs
from fedrolex.rounds import Server
from fedrolex.slicing import Scheme

Option = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class SubModels(Averaging):
    """Clients train the windows of a scheme; every position is averaged over the clients that hold it.

    Attributes:
        scheme: the name of the scheme: ``rolling``, ``static``, ``random``, ``blocks``, or one's own.
        options: keyword arguments of the scheme, e.g. ``{overlap: 0.5}``; a ``seed`` is the run's where none is given.
    """

    scheme: str = "rolling"
    options: dict[str, Option] = field(default_factory=dict)
    needs = Needs(larger_server=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._made(self.options)

    def windows(self, server: Server) -> Scheme:
        """The scheme of that name, with its options."""
        kind = SCHEMES.find(self.scheme)
        draws = is_dataclass(kind) and any(option.name == "seed" for option in fields(kind))
        return self._made({"seed": server.seed, **self.options} if draws else self.options)

    def _made(self, options: dict[str, Option]) -> Scheme:
        try:
            made: Scheme = SCHEMES.find(self.scheme)(**options)
        except TypeError as error:
            raise FedrolexError(f"method.options do not fit the scheme {self.scheme}: {error}") from error
        return made
