"""Methods whose clients end the process they are trained in, and others to go wrong: workers find them by name."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from fedrolex.clients import LocalTraining, Upload, Visit
from fedrolex.methods import FedRolex, Setup, adding
from fedrolex.rounds import Round


@dataclass(frozen=True, kw_only=True)
class Troubled(LocalTraining):
    """Training that ends its own process for one client."""

    client: int
    flag: str
    times: int
    pause: float

    def before(self, visit: Visit) -> None:
        """Go, where it is this client and it has not happened often enough."""
        time.sleep(self.pause)
        flag = Path(self.flag)
        if visit.job.client == self.client and len(flag.read_text()) < self.times:
            with flag.open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Fatal(FedRolex):
    """FedRolex with a client that kills its process so many times; the file ``flag`` counts them."""

    client: int = -1
    flag: str = ""
    times: int = 1
    pause: float = 0.0

    def work(self, setup: Setup) -> LocalTraining:
        """Troubled training."""
        own = {"client": self.client, "flag": self.flag, "times": self.times, "pause": self.pause}
        return Troubled(**asdict(setup.client), **own)  # type: ignore[arg-type]


class Forgetful(FedRolex):
    """A method that says that it adds all answers, and does not."""

    @adding
    def take(self, round: Round, upload: Upload) -> None:
        """Add the answers of some."""
        if upload.job.client % 2:
            super().take(round, upload)
