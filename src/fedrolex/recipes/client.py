"""What a client does, as a recipe says it."""

from dataclasses import dataclass

from fedrolex.clients import LocalTraining


@dataclass(frozen=True, kw_only=True)
class ClientRecipe(LocalTraining):
    """The settings of :class:`~fedrolex.clients.work.LocalTraining`, with momentum."""

    momentum: float = 0.9
