"""What ``flwr run`` is told: the recipe, and how messages are carried."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fedrolex.core import FedrolexError, check_numbers, check_words
from fedrolex.core.errors import did_you_mean
from fedrolex.flower.transport import Transport
from fedrolex.recipes import Recipe, find_recipe
from fedrolex.recipes.recipe import FREE


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The run-config of an app, keys with ``-`` for ``_``.

    Attributes:
        recipe: the name of one of the package's recipes, or a YAML file.
        set: changes to it, as on the command line, separated by ``;``.
        out: the run's folder, at the server; one that is there is gone on with.
        timeout: seconds that a device has for its round.
        grace: seconds that late devices are given once the recipe's quorum has answered; negative waits for all.
        patience: seconds to wait, before the first round, for as many devices as the recipe has clients.
        transport: how values travel: ``fp32``, ``bf16``, ``int8``.
        norm_factor: how many times the median norm of a change is too far to be believed.
        secure: whether the server sees sums of what devices send only.
        least: with ``secure``, fewest devices that a value is a sum of.
        threshold: with ``secure``, more than this share of a round's devices must stay to its end; at least a half.
        reach: with ``secure``, the largest change of a value.
    """

    recipe: str = "digits"
    set: str = ""
    out: str = "runs/flower"
    timeout: float = 600.0
    grace: float = -1.0
    patience: float = 60.0
    transport: Transport = "fp32"
    norm_factor: float = 10.0
    secure: bool = False
    least: int = 3
    threshold: float = 0.66
    reach: float = 8.0

    def __post_init__(self) -> None:
        check_words("run-config", self)
        check_numbers("run-config", self, least={}, positive=("timeout", "reach"))
        if not 0.5 <= self.threshold < 1:
            raise FedrolexError(f"threshold is {self.threshold}: give at least a half, below 1")
        if self.least < 2:
            raise FedrolexError(f"least is {self.least}: a sum of fewer than 2 devices hides nothing")

    @staticmethod
    def read(config: Mapping[str, Any]) -> "Settings":
        """From a run-config; keys that are not known are an app's own."""
        known = {each.name.replace("_", "-"): each.name for each in fields(Settings)}
        wrong = next((key for key in config if key not in known and did_you_mean(key, list(known))), None)
        if wrong is not None:
            raise FedrolexError(f"run-config has {wrong!r}{did_you_mean(wrong, list(known))}")
        given: dict[str, Any] = {known[key]: value for key, value in config.items() if key in known}
        for key in FLOATS & set(given):
            given[key] = float(given[key]) if type(given[key]) is int else given[key]
        return Settings(**given)

    def described(self, given: Recipe | None = None) -> Recipe:
        """The recipe; devices run their work by the loop engine, whatever it says of simulations."""
        recipe = find_recipe(self.recipe) if given is None else given
        changes = [change.strip() for change in self.set.split(";") if change.strip()]
        recipe = replace(recipe.with_settings(changes), engine="loop", compare=False)
        recipe = replace(recipe, method=recipe.method.on_devices())
        fleet = recipe.fleet
        for key in ("redrawn", "stragglers", "balanced"):
            if getattr(fleet, key):
                raise FedrolexError(f"fleet.{key} is for simulations: leave it out where devices are real")
        needs = recipe.method.needs
        if self.secure and (not needs.secure_aggregation or needs.client_state):
            raise FedrolexError(f"method {recipe.method.name} needs more of a client than sums: leave secure out")
        if self.secure and self.transport != "fp32":
            raise FedrolexError(f"transport is {self.transport}: secure sums have a rounding of their own, use fp32")
        if recipe.method.needs.at_hand:
            why = "its server reads what stays on devices here"
            raise FedrolexError(f"method {recipe.method.name} cannot run on real devices: {why}")
        return recipe


FLOATS = frozenset(each.name for each in fields(Settings) if each.type is float)


def digest(recipe: Recipe) -> str:
    """A hash of what a recipe computes, however long and wherever: both sides must have the same."""
    plain = {key: value for key, value in recipe.encode().items() if key not in (*FREE, "rounds")}
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=16).hexdigest()
