"""The package works without its extras, and says in one line what is missing."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
sys.modules.update(dict.fromkeys(["flwr", "cryptography", "dp_accounting", "Crypto"]))  # as if they were not there
import fedrolex
from fedrolex.cli import app
private = "fedrolex.Recipe().with_settings(['method=private', 'method.quantile=null'])"
for what in ("import fedrolex.flower", f"fedrolex.prepare({private})"):
    try:
        exec(what)
    except fedrolex.FedrolexError as error:
        print(error)
"""


def test_what_is_missing_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("pip install 'fedrolex[flower]'" in line for line in lines)
