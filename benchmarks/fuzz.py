"""Changes files and replies for minutes, guided by coverage: nothing but clear errors may come out.

    python benchmarks/fuzz.py recipe --seconds 180
    python benchmarks/fuzz.py all --seconds 180

Needs fedrolex[fuzz] (atheris, for Linux) and, for what devices send, fedrolex[flower]. A target is one of those in
``tests/fuzz_targets.py`` and ``tests/fuzz_uploads.py``. Every target runs in a process of its own, which ends with
a traceback and the bytes where another error comes out, where one input takes more than ten seconds, or the process
more than two gigabytes. The last line is JSON: seconds and executions of every target.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
INSTRUMENTED = ["fedrolex", "yaml", "zipfile"]
LONGEST_INPUT, SLOWEST, MEGABYTES = 2**14, 10, 2048


def targets() -> list[str]:
    """The names of all targets, found without importing what they need."""
    files = ["fuzz_targets.py"] + (["fuzz_uploads.py"] if find_spec("flwr") is not None else [])
    return [name for file in files for name in re.findall(r'^    "(\w+)": Target\(', (TESTS / file).read_text(), re.M)]


def fuzz(name: str, seconds: int, corpus: Path) -> None:
    """Change inputs of one target in this process, which ends with it."""
    import atheris

    sys.path.insert(0, str(TESTS))
    with atheris.instrument_imports(include=INSTRUMENTED):
        from fuzz_targets import TARGETS

        import fedrolex.api  # noqa: F401

        if name not in TARGETS:
            from fuzz_uploads import TARGETS
    target = TARGETS[name]
    for place, data in enumerate(target.whole()):
        (corpus / str(place)).write_bytes(data)
        target(data)  # what is made the first time does not count as slow
    limits = [f"-max_total_time={seconds}", f"-timeout={SLOWEST}", f"-rss_limit_mb={MEGABYTES}"]
    limits += [f"-max_len={LONGEST_INPUT}", f"-artifact_prefix={corpus}/found-", "-verbosity=1", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *limits, str(corpus)], target)
    atheris.Fuzz()


def run(name: str, seconds: int) -> dict[str, object]:
    """One target in a process of its own; what it says goes to stderr."""
    with tempfile.TemporaryDirectory() as corpus:
        words = [sys.executable, __file__, name, "--seconds", str(seconds), "--corpus", corpus]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        found = sorted(Path(corpus).glob("found-*"))
        for path in found:
            print(f"{name}: {path.name.partition('-')[2]} on {path.read_bytes()!r}", file=sys.stderr)
        if done.returncode or found:
            print(done.stdout[-6000:], file=sys.stderr)
    count = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stdout)
    covered = re.findall(r"cov: (\d+)", done.stdout)
    return {
        "seconds": seconds,
        "executions": int(count[1]) if count else None,
        "covered": int(covered[-1]) if covered else None,
        "failed": bool(done.returncode or found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=[*targets(), "all"])
    parser.add_argument("--seconds", type=int, default=180, help="for every target")
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if find_spec("atheris") is None:
        parser.error("needs atheris: pip install fedrolex[fuzz]")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.corpus is not None:
        fuzz(given.target, given.seconds, given.corpus)
        return
    chosen = targets() if given.target == "all" else [given.target]
    results = {name: run(name, given.seconds) for name in chosen}
    print(json.dumps({"benchmark": "fuzz", "targets": results}))
    raise SystemExit(any(result["failed"] for result in results.values()))


if __name__ == "__main__":
    main()
