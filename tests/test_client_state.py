"""States of clients: kept by number, few in memory, the same after going back to a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods_shared import small

from fedrolex import FedrolexError, Job, LocalTraining, Method, Needs, Round, Server, Setup, Upload, Visit
from fedrolex.rounds.client_states import ClientStates
from fedrolex.runs.training import Training


def state(value: float) -> dict[str, torch.Tensor]:
    return {"c": torch.full((3,), value)}


def test_states_spill_to_disk_and_come_back(tmp_path: Path) -> None:
    states = ClientStates(tmp_path, in_memory=2)
    for client in range(10):
        states.put(client * 100_003, 0, state(client))
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 8
    for client in range(10):
        assert torch.equal((states.get(client * 100_003) or {})["c"], state(client)["c"])
    assert states.get(7) is None


def test_what_is_put_is_copied(tmp_path: Path) -> None:
    states = ClientStates(tmp_path)
    mine = state(1)
    states.put(0, 0, mine)
    mine["c"].zero_()
    assert torch.equal((states.get(0) or {})["c"], state(1)["c"])


@settings(max_examples=25)
@given(
    writes=st.lists(st.lists(st.integers(0, 4), max_size=4, unique=True), min_size=6, max_size=6),
    checkpoint=st.integers(1, 5), memory=st.integers(1, 6),
)  # fmt: skip
def test_going_back_to_a_checkpoint_finds_the_states_it_had(
    writes: list[list[int]], checkpoint: int, memory: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rounds write states; the run dies after the last one and goes on from the checkpoint."""
    folder = tmp_path_factory.mktemp("states")
    states = ClientStates(folder, memory)
    wanted: dict[int, float] = {}
    hash = ""
    for round, clients in enumerate(writes):
        if round == checkpoint:
            hash = states.save(round)
            wanted = {c: max((10 * r + c for r in range(round) if c in writes[r]), default=-1) for c in range(5)}
        for client in clients:
            states.put(client, round, state(10 * round + client))
    again = ClientStates(folder, memory)
    again.restore(checkpoint, hash)
    for client, value in wanted.items():
        found = again.get(client)
        assert (found is None) == (value < 0)
        assert found is None or torch.equal(found["c"], state(value)["c"])


def test_two_crashes_in_a_row(tmp_path: Path) -> None:
    """States saved for a checkpoint that was never written must not count as needed."""
    states = ClientStates(tmp_path, in_memory=1)
    states.put(0, 1, state(1))
    states.save(2)
    states.put(0, 3, state(3))
    states.save(4)
    states = ClientStates(tmp_path, in_memory=1)
    states.restore(2)
    for round in (2, 3):
        states.put(0, round, state(10 + round))
        states.put(1, round, state(10 + round))
    states = ClientStates(tmp_path, in_memory=1)
    states.restore(2)
    assert torch.equal((states.get(0) or {})["c"], state(1)["c"])
    assert states.get(1) is None


def test_old_versions_do_not_pile_up(tmp_path: Path) -> None:
    states = ClientStates(tmp_path, in_memory=1)
    for round in range(20):
        states.put(1, round, state(round))
        states.put(2, round, state(round))
        states.save(round + 1)
    assert len(list(tmp_path.glob("*/*.safetensors"))) <= 4


def test_damage_and_mistakes_are_one_line(tmp_path: Path) -> None:
    states = ClientStates(tmp_path)
    states.put(5, 0, state(1))
    states.save(1)
    next(tmp_path.glob("*/*.safetensors")).write_bytes(b"nothing")
    with pytest.raises(FedrolexError, match="the state of client 5 is damaged"):
        ClientStates(tmp_path).get(5)
    with pytest.raises(FedrolexError, match="give at least 1"):
        ClientStates(tmp_path, 0)


class Counting(LocalTraining):
    """Keeps a number that grows by one with every round that counts for the job."""

    def after(self, visit: Visit) -> None:
        before = torch.zeros(()) if visit.job.kept is None else visit.job.kept["count"]
        visit.kept = {"count": before + 1}


@dataclass(frozen=True, kw_only=True)
class TwoJobs(Method):
    """Every client has two jobs; answers to the second do not count in round 1."""

    needs = Needs(client_state=True)

    def work(self, setup: Setup) -> LocalTraining:
        return Counting(**asdict(setup.client))

    def jobs(self, server: Server, round: int) -> list[Job]:
        return [replace(job, name=name) for job in super().jobs(server, round) for name in ("", "second")]

    def take(self, round: Round, upload: Upload) -> None:
        if upload.job.name and round.number == 1:
            raise FedrolexError("not now")
        super().take(round, upload)


def test_jobs_of_one_client_keep_their_own() -> None:
    """A job whose answer does not count leaves what it kept before, and what the other job keeps."""
    plain = small("method=heterofl", 'fleet.capacities=["1"]', "fleet.cohort=6", "task.limit=60")
    server, setup = plain.server, Setup(plain.server.task, plain.server.fleet, plain.work)
    made = Training(server, TwoJobs(), TwoJobs().work(setup), plain.engine)
    for counts in ([1, 1], [2, 1], [3, 2]):
        assert made.run_round()["clients"] == 6
        assert server.clients is not None
        kept = server.clients.get(3) or {}
        assert [int(kept[name]) for name in ("count", "second:count")] == counts
