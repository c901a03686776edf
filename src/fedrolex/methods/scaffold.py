"""SCAFFOLD: control variates against client drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
2020. The server keeps c, every client cᵢ, both zero at first and in the shapes of the trainable parameters. A client
steps along g − cᵢ + c, then renews its own:

    option I:   cᵢ⁺ = gradient of its loss at the model it received
    option II:  cᵢ⁺ = cᵢ − c + (received − trained) / (K · η)

and the server adds the sum of all cᵢ⁺ − cᵢ, divided by the number of *all* clients, to c. So c stays the mean of
all cᵢ, whoever takes part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, get_args

from torch import Tensor

from fedrolex.clients.work import LocalTraining
from fedrolex.core.errors import FedrolexError
from fedrolex.methods.fedavg import fedavg
from fedrolex.methods.method import Method
from fedrolex.slicing.windows import Rounding

Option = Literal["I", "II"]
Denominator = Literal["steps", "momentum"]


@dataclass(frozen=True, kw_only=True)
class Controls:
    """How control variates are renewed.

    Attributes:
        option: see above.
        denominator: of option II: ``steps`` is K · η, as in the paper, which has no momentum; ``momentum`` is what a
            gradient that stays the same moves a client by in K steps with momentum.
    """

    option: Option = "II"
    denominator: Denominator = "steps"

    def correction(self, c: Mapping[str, Tensor], own: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """What is added to a client's gradients: c − cᵢ, with cᵢ = 0 for a newcomer."""
        return {name: tensor.clone() if own is None else tensor - own[name] for name, tensor in c.items()}

    def renewed(
        self,
        correction: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
        trained: Mapping[str, Tensor],
        distance: float,
    ) -> dict[str, Tensor]:
        """cᵢ⁺ of option II; ``distance`` is the denominator, see :meth:`distance`."""
        return {name: (received[name] - trained[name]) / distance - change for name, change in correction.items()}

    def distance(self, client: LocalTraining, round: int, steps: int) -> float:
        """How far a gradient of 1 moves a parameter in so many steps."""
        m = client.momentum if self.denominator == "momentum" else 0.0
        return client.rate(round) * (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)


def scaffold(
    client: LocalTraining,
    *,
    option: Option = "II",
    denominator: Denominator | None = None,
    width: Fraction | str = "1",
    able_only: bool = False,
    rounding: Rounding = "floor",
) -> Method:
    """One model of ``width`` for everyone, with control variates."""
    if option not in get_args(Option):
        raise FedrolexError(f"method.option is {option!r}: use I or II")
    if client.optimizer != "sgd":
        raise FedrolexError(f"scaffold needs client.optimizer sgd: with {client.optimizer} a step is not a gradient")
    if client.momentum and option == "II" and denominator is None:
        raise FedrolexError(
            "scaffold with client.momentum: say by what option II divides, method.denominator=momentum (exact for a "
            "gradient that stays) or steps (too large by up to 1 / (1 - momentum)); or set client.momentum=0"
        )
    controls = Controls(option=option, denominator=denominator or "steps")
    work = replace(client, gradient=option == "I")
    average = fedavg(work, width=width, able_only=able_only, rounding=rounding)
    return replace(average, name="scaffold", controls=controls)
