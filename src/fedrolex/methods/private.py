"""Private averages of sub-models: differential privacy for clients, given by the server.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018, with adaptive
clipping: Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021.
A client's change, zero outside its window, is shortened to the norm C as one vector. Gaussian noise of z · C is added
to the sum over a random sample of clients. The sum is divided by how many clients are *expected* at a position: how
many came tells of a single client.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrolex.clients import MODEL, LocalTraining, Upload
from fedrolex.core import FedrolexError, check_numbers, random_words
from fedrolex.methods.needs import Needs
from fedrolex.methods.setup import Setup
from fedrolex.methods.submodels import SubModels
from fedrolex.privacy.accountant import epsilon
from fedrolex.rounds import Fleet, Member, Round, Server, State
from fedrolex.slicing import Window
from fedrolex.tasks import Measure

CLIP = "clip"  # the section with the largest norm of a change


@dataclass(frozen=True, kw_only=True)
class Private(SubModels):
    """Sub-models by any scheme, averaged with noise; every client takes part with the chance cohort / clients.

    Attributes:
        noise: z, the noise's standard deviation over the largest norm; of all that is published together.
        clip: C, the largest norm of a client's change, in the first round.
        quantile: C follows this quantile of the norms; null keeps it.
        clip_rate: how quickly C follows.
        count_noise: standard deviation of the noise on the number of changes shorter than C; null is a twentieth of the
            expected clients.
        least: positions are divided by at least this share of the expected clients, so that noise has a bound.
        delta: of (ε, δ); null is clients^-1.1.
        secret: samples and noise come from the system, and not from the run's seed, which others may know.
    """

    noise: float = 1.0
    clip: float = 0.1
    quantile: float | None = 0.5
    clip_rate: float = 0.2
    count_noise: float | None = None
    least: float = 0.1
    delta: float | None = None
    secret: bool = False
    needs = Needs(larger_server=True, apart=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers("method", self, least={"noise": 0, "clip_rate": 0, "least": 0}, positive=("clip",))
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise FedrolexError(f"method.quantile is {self.quantile}: give a share between 0 and 1, or null")
        if self.weighting != "uniform" or self.norms != "shared" or self.rows:
            raise FedrolexError("private averages need weighting uniform, norms shared, rows false: others tell more")

    def on_devices(self) -> "Private":
        """On real devices nobody may know samples or noise."""
        return replace(self, secret=True)

    def check_fleet(self, fleet: Fleet, client: LocalTraining, scale: int) -> None:
        """Every client must have the same chance, whoever the others are."""
        super().check_fleet(fleet, client, scale)
        for name in ("stratified", "balanced"):
            if getattr(fleet, name):
                raise FedrolexError(f"fleet.{name} is true: private averages draw every client by itself, leave it out")

    def check(self, setup: Setup) -> None:
        """The noise must be enough for both sums, and there must be an accountant."""
        super().check(setup)
        fleet = setup.fleet
        self.noise_on_changes(fleet.cohort)
        epsilon(0.0, fleet.cohort / fleet.clients, 1, self.delta_of(fleet.clients))

    # --- numbers ---

    def delta_of(self, clients: int) -> float:
        """δ."""
        return self.delta if self.delta is not None else float(max(clients, 2)) ** -1.1

    def noise_on_count(self, expected: float) -> float:
        """σ_b."""
        return self.count_noise if self.count_noise is not None else 0.05 * expected

    def noise_on_changes(self, expected: float) -> float:
        """z_Δ: with the noise on the count, the noise of both together is z."""
        if self.quantile is None or not self.noise:
            return self.noise
        count = 2 * self.noise_on_count(expected)
        if self.noise >= count:
            remedy = f"set method.count_noise above {self.noise / 2:g}, or method.quantile to null"
            raise FedrolexError(f"noise {self.noise:g} is more than the count of {expected:g} clients has: {remedy}")
        return float((self.noise**-2 - count**-2) ** -0.5)

    def expected(self, server: Server, round: int, name: str) -> Tensor:
        """How many clients are expected at every position of a tensor; broadcasts against it."""
        axes, fleet = server.main.axes, server.fleet
        counts = torch.zeros(axes.region(name, Window({}), counts=True).full, dtype=torch.float64)
        for window, clients in self._windows(server, round).items():
            axes.region(name, window, counts=True).add_constant(counts, clients * fleet.cohort / fleet.clients)
        return counts

    def _windows(self, server: Server, round: int) -> Mapping[Window, int]:
        """The windows that clients would train in a round, and how many clients would."""
        known: dict[Window, int] = {}
        for client in range(server.fleet.clients):
            window = server.window(round, server.fleet.capacity(client, round), client)
            known[window] = known.get(window, 0) + 1
        return known

    # --- a round ---

    def begin(self, server: Server) -> State:
        """The largest norm of a change."""
        return {**super().begin(server), CLIP: {"norm": torch.tensor(self.clip, dtype=torch.float64)}}

    def members(self, server: Server, round: int) -> list[Member]:
        """A Poisson sample."""
        return server.fleet.sampled(round, server.fleet.cohort / server.fleet.clients, self._key(server))

    def take(self, round: Round, upload: Upload) -> None:
        """Shorten the change, as one vector, and add it to the sum."""
        if not upload.tensors:
            raise FedrolexError("private averages shorten every client's change, which secure sums hide: use either")
        received, trained = round.plan.received(upload.job), round.server.trainable()
        change = {name: upload.tensors[name].double() - received[name].double() for name in trained}
        norm = float(torch.stack([tensor.norm() for tensor in change.values()]).norm())
        if not np.isfinite(norm):
            raise FedrolexError("sent a change without a norm")
        most = float(round.state[CLIP]["norm"])
        sums = round.notes.setdefault("sums", {n: torch.zeros_like(round.state[MODEL][n]).double() for n in trained})
        for name, tensor in change.items():
            region = round.server.main.axes.region(name, upload.job.window)
            region.add(sums[name], tensor, min(1.0, most / max(norm, 1e-30)))
        round.notes["short"] = round.notes.get("short", 0) + (norm <= most)
        round.notes["clients"] = round.notes.get("clients", 0) + 1

    def finish(self, round: Round) -> State:
        """Noise, the expected number of clients, the next largest norm."""
        server, most = round.server, float(round.state[CLIP]["norm"])
        expected = float(server.fleet.cohort)
        scale = self.noise_on_changes(expected) * most
        draw, new = self._random(server, round.number), dict(round.state[MODEL])
        for name, total in round.notes["sums"].items():
            base, counts = round.state[MODEL][name], self.expected(server, round.number, name).to(total.device)
            noisy = total + scale * torch.from_numpy(draw.standard_normal(total.shape)).to(total.device)
            step = noisy / counts.clamp(min=max(self.least * expected, 1e-9))
            new[name] = torch.where(counts > 0, (base.double() + step).to(base.dtype), base)
        moved = self.server_optimizer.moved(round.state, {MODEL: new}, server.trainable())
        return {**moved, CLIP: {"norm": torch.tensor(self._next(round, draw, expected), dtype=torch.float64)}}

    def _next(self, round: Round, draw: np.random.Generator, expected: float) -> float:
        """C of the next round: smaller where more than the quantile were shorter."""
        most = float(round.state[CLIP]["norm"])
        if self.quantile is None:
            return most
        count = round.notes["short"] - round.notes["clients"] / 2  # Σ (b − ½)
        noisy = count + (self.noise_on_count(expected) if self.noise else 0.0) * draw.standard_normal()
        return most * exp(-self.clip_rate * (noisy / expected + 0.5 - self.quantile))

    # --- what comes of it ---

    def spent(self, server: Server) -> float:
        """ε of the rounds so far."""
        fleet = server.fleet
        return epsilon(self.noise, fleet.cohort / fleet.clients, server.round, self.delta_of(fleet.clients))

    def evaluate(self, server: Server, measure: Measure) -> dict[str, Any]:
        """Metrics, with the largest norm as it is now."""
        return {**super().evaluate(server, measure), "clip": float(server.state[CLIP]["norm"])}

    def facts(self, server: Server) -> dict[str, Any]:
        """What is promised to whom."""
        fleet = server.fleet
        spent, delta = self.spent(server), self.delta_of(fleet.clients)
        how = f"noise {self.noise:g}, sampling rate {fleet.cohort / fleet.clients:.3g}, {server.round} rounds"
        source = "" if self.secret else "; a simulation's: its noise follows from the seed"
        said = f"ε = {spent:.3g} at δ = {delta:.2g}, for a client added or removed with all its data ({how}{source})"
        return {"privacy": said, "epsilon": spent if isfinite(spent) else None, "delta": delta}

    @cached_property
    def _secret(self) -> int:
        return secrets.randbits(64)

    def _key(self, server: Server) -> int:
        return self._secret if self.secret else server.seed

    def _random(self, server: Server, round: int) -> np.random.Generator:
        """Where a round's noise comes from."""
        low, high = (int(word) for word in random_words(2, server.seed, "noise", round))
        return np.random.Generator(np.random.Philox(key=secrets.randbits(128) if self.secret else low | high << 64))
