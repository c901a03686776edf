"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_python_of_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 3
    exec(compile("\n".join(blocks), "README.md", "exec"), {})
