"""Options and arguments that several commands have, and what groups of commands have in common."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

INPUT = "2x3x224x224"

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
DataFolder = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="DIR", help="Folder of the data sets.", show_default="$FEDROLEX_DATA or ~/.cache/fedrolex"
    ),
]
RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name or YAML file.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, e.g. client.lr=0.05. Repeatable."),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="[NAME=]SHAPE[:DTYPE[:HIGH]]",
        help=f"An input of the example, e.g. 2x20:int64:1000 [default: the model's own, or {INPUT}]. Repeatable.",
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Option(
        "--arg", metavar="NAME=VALUE", help="An argument of the factory; VALUE is YAML, or MODULE:OBJECT. Repeatable."
    ),
]
Figure = Annotated[Path | None, typer.Option(help="Also draw it to this file (png, svg or pdf).")]


class Group(TyperGroup):
    """Commands by name; for a mistyped one a near one is named once. Typer does that, and newer Clicks do as well."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        clicks = sys.modules[typer.BadParameter.__module__]
        self.suggest_commands = not hasattr(clicks, "NoSuchCommand")
