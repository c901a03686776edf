"""What secure sums cost in bytes: a device's upload by areas, beside the model padded with zeros.

    python benchmarks/secure_upload.py [--cohort 20]

Ends with one flat JSON object: for every capacity the bytes of a plain sub-model and of its areas, these also as a
ratio of the padded model.
Nothing is trained; no data is read.
"""

from __future__ import annotations

import argparse
import json
from fractions import Fraction

import torch

from fedrolex import Rolling, trace
from fedrolex.clients import MODEL, Job, Network
from fedrolex.models import preresnet18
from fedrolex.privacy.areas import Areas

LEVELS = tuple(Fraction(1, 2**power) for power in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cohort", type=int, default=20)
    parser.add_argument("--least", type=int, default=3)
    parser.add_argument("--round", type=int, default=7)
    given = parser.parse_args()
    module = preresnet18()
    axes = trace(module, torch.randn(2, 3, 32, 32))
    state = {MODEL: axes.state(module)}
    levels = [LEVELS[client % len(LEVELS)] for client in range(given.cohort)]
    jobs = [
        Job(client, level, Rolling().window(axes, round=given.round, capacity=level, client=client))
        for client, level in enumerate(levels)
    ]
    areas = Areas.of(jobs, {MODEL: Network(module, axes)}, state, given.least)
    padded = 4 * sum(tensor.numel() for name, tensor in state[MODEL].items() if axes.tensors[name].floating)
    found: dict[str, float] = {
        "cohort": given.cohort,
        "least": given.least,
        "areas": len(areas.found),
        "padded": padded,
    }
    for job in jobs[: len(LEVELS)]:
        plain = 4 * sum(
            torch.Size(axes.shape(name, axes.widths(job.window))).numel()
            for name in state[MODEL]
            if axes.tensors[name].floating
        )
        held = 4 * sum(area.size for area in areas.found if job.client in area.members)
        found |= {
            f"plain_{job.capacity}": plain,
            f"areas_{job.capacity}": held,
            f"areas_{job.capacity}_ratio": held / padded,
        }
        print(
            f"capacity {job.capacity}: plain {plain:,}, areas {held:,}, padded {padded:,} bytes ({held / padded:.1%})"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
