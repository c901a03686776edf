"""Finding what a user names on the command line: ``package.module:attribute``."""

import importlib
import sys
from typing import Any

from fedrolex.core.errors import FedrolexError, did_you_mean, in_one_line

MISMATCH = "; this torchvision was built for another torch: reinstall the two together"


def resolve(path: str, *, here: bool = True) -> Any:
    """The object behind ``package.module:attribute`` (dotted attributes allowed).

    With ``here``, modules in the current folder are found, too, and first.
    """
    module_name, colon, attributes = path.partition(":")
    if not (module_name and colon and attributes):
        raise FedrolexError(f"{path!r} is not MODULE:FACTORY: give e.g. torchvision.models:resnet18")
    if here and "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise FedrolexError(f"cannot import {module_name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        remedy = MISMATCH if "operator torchvision::" in str(error) else ""
        raise FedrolexError(f"importing {module_name!r} failed: {type(error).__name__}: {error}{remedy}") from error
    with in_one_line(f"{module_name} fails when it is asked for {attributes!r}"):
        for attribute in attributes.split("."):
            if not hasattr(found, attribute):
                raise FedrolexError(f"{module_name} has no {attributes!r}{did_you_mean(attribute, dir(found))}")
            found = getattr(found, attribute)
    return found


def extra(package: str, what: str) -> Any:
    """A package that only ``what`` needs; one line where it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise FedrolexError(f"{what} needs the package {package}: pip install {package} ({error})") from None
