"""What a user is told about a mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedrolex import FedrolexError


def told(mistake: Callable[[], object]) -> str:
    """The message of a mistake: always one line."""
    with pytest.raises(FedrolexError) as caught:
        mistake()
    assert "\n" not in str(caught.value)
    return str(caught.value)
