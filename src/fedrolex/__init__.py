"""One model, every device: train a large PyTorch model on devices that each hold only a part of it.

The names are those of :mod:`fedrolex.api`. That module is imported when one of its names is used first: importing
PyTorch takes seconds, and ``fedrolex --help`` needs none of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedrolex.core.version import VERSION

if TYPE_CHECKING:
    from fedrolex.api import *  # noqa: F403
    from fedrolex.api import __all__ as __all__

__version__ = VERSION


def __getattr__(name: str) -> Any:
    if name != "__all__" and name.startswith("_"):  # what Python itself asks for
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    api = import_module("fedrolex.api")
    if name not in ("__all__", *api.__all__):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(api, name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]
