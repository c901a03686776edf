"""Options that several commands have."""

from typing import Annotated

import typer

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, e.g. client.lr=0.05. Repeatable."),
]
DataFolder = Annotated[
    str | None, typer.Option("--data", metavar="DIR", help="Folder of the data sets.", show_default="FEDROLEX_DATA")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
