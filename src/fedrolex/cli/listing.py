"""``fedrolex list`` and ``fedrolex show``: what there is, and what a recipe says in full."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import typer
import yaml
from rich.text import Text

from fedrolex.cli.console import console, remark, table
from fedrolex.cli.options import AsJson, RecipeName, Settings
from fedrolex.core import METHODS, FedrolexError
from fedrolex.core.registry import PACKAGE, REGISTRIES
from fedrolex.methods import Needs
from fedrolex.recipes import find_recipe, recipe_names

COLUMNS: dict[str, Callable[[Needs], bool]] = {
    "clients of several sizes": lambda needs: not needs.one_size,
    "networks of several families": lambda needs: needs.families,
    "server larger than all clients": lambda needs: needs.larger_server,
    "secure aggregation possible": lambda needs: needs.secure_aggregation,
    "needs public data": lambda needs: needs.public,
    "needs validation data": lambda needs: needs.validation,
    "clients keep state": lambda needs: needs.client_state,
}
"""The paper's Table 1 as it holds here."""


def list_command(as_json: AsJson = False) -> None:
    """Everything that recipes may name, and from where it comes."""
    origins = {kind: registry.origins() for kind, registry in REGISTRIES.items()}
    if as_json:
        found: dict[str, Any] = {kind: list(names) for kind, names in origins.items()}
        needs = {name: asdict(needs) for name, needs in _needs().items() if isinstance(needs, Needs)}
        typer.echo(json.dumps({**found, "recipes": recipe_names(), "needs": needs, "origins": origins}))
        return
    screen = console()
    rows = [(_with_origin(name, origins["methods"][name]), *_said(needs)) for name, needs in _needs().items()]
    screen.print(table(("method", *COLUMNS), rows, words=len(COLUMNS) + 1))
    for kind, names in list(origins.items())[1:]:
        shown = ", ".join(_with_origin(name, origin) for name, origin in names.items())
        screen.print(Text.assemble((kind, "bold"), f": {shown}"))
    screen.print(Text.assemble(("recipes", "bold"), f": {', '.join(recipe_names())}"))
    remark(screen, "Your own: package.module:Name instead of a name, or an entry point.")


def _needs() -> dict[str, Needs | str]:
    """What each method needs, or why it cannot be imported."""
    found: dict[str, Needs | str] = {}
    for name in METHODS.names():
        try:
            found[name] = METHODS.find(name).needs
        except FedrolexError as error:
            found[name] = str(error)
    return found


def _with_origin(name: str, origin: str) -> str:
    return name if origin == PACKAGE else f"{name} ({origin})"


def _said(needs: Needs | str) -> list[str]:
    return [needs] if isinstance(needs, str) else ["yes" if holds(needs) else "" for holds in COLUMNS.values()]


def show_command(recipe: RecipeName, settings: Settings = None) -> None:
    """The fully resolved recipe: every key that counts, defaults included."""
    typer.echo(yaml.safe_dump(find_recipe(recipe).with_settings(settings or []).encode(), sort_keys=False), nl=False)
