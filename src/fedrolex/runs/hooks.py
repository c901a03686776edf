"""A method's hooks as the training loop calls them: what goes wrong inside is one line, what they give is checked."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from fedrolex.clients import MODEL, Job, Network
from fedrolex.core import FedrolexError
from fedrolex.methods.method import Method
from fedrolex.methods.setup import Setup
from fedrolex.rounds import Round, Server, State, out_of_memory
from fedrolex.slicing import one_line


def calling(method: Method, hook: str) -> AbstractContextManager[None]:
    """Inside, a hook of a method: what it raises becomes one line that names it; a lack of memory stays one."""
    return reported(f"{hook}() of method {method.name} failed")


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Inside, code of a method or engine: what it raises becomes a line with ``what``; a lack of memory stays one."""
    try:
        yield
    except FedrolexError:
        raise
    except (Exception, SystemExit) as error:
        if out_of_memory(error):
            raise
        raise FedrolexError(f"{what}: {type(error).__name__}: {one_line(error)}") from error


def begun(method: Method, server: Server) -> State:
    """The sections that a method adds to the server's state."""
    with calling(method, "begin"):
        state = method.begin(server)
        _check_sections(state)
        _check_names(state)
    if MODEL in state:
        raise FedrolexError(f"begin() of method {method.name} returns a section {MODEL!r}, which the model has")
    return state


def jobs_of(method: Method, server: Server, round: int) -> list[Job]:
    """The jobs of a round; each is of a known network, and its client has no other of its name."""
    with calling(method, "jobs"):
        found, keys = method.jobs(server, round), set()
        for job in found:
            if not 0 <= job.client < server.fleet.clients:
                asked = f"asks client {job.client}: there are 0 to {server.fleet.clients - 1}"
                raise FedrolexError(f"jobs() of method {method.name} {asked}")
            if not isinstance(job.name, str):
                raise FedrolexError(f"jobs() of method {method.name} gives a job the name {job.name!r}: give text")
            if not job.sections:
                raise FedrolexError(f"jobs() of method {method.name} gives client {job.client} no sections")
            if job.network not in server.networks or not all(section in server.state for section in job.sections):
                asked = f"asks for network {job.network!r} with sections {', '.join(job.sections)}"
                raise FedrolexError(f"jobs() of method {method.name} {asked}: the run has {', '.join(server.state)}")
            if job.key in keys:
                twice = f"gives client {job.client} two jobs of one name: tell them apart with Job(..., name=...)"
                raise FedrolexError(f"jobs() of method {method.name} {twice}")
            keys.add(job.key)
    return found


def awaited_of(method: Method, jobs: Sequence[Job]) -> list[Job]:
    """The jobs whose answers count."""
    with calling(method, "waits_for"):
        said = [method.waits_for(job) for job in jobs]
        if not all(isinstance(each, bool) for each in said):
            raise TypeError("it must return True or False")
    return [job for job, counts in zip(jobs, said, strict=True) if counts]


def sent_to(method: Method, server: Server, job: Job) -> Mapping[str, Mapping[str, Tensor]]:
    """What a method sends to a client beside its part of the network."""
    with calling(method, "send"):
        sent = method.send(server, job)
        _check_sections(sent)
    return sent


def finished(method: Method, round: Round) -> State:
    """The sections that a round changes, each with the tensors that the server's state has in it."""
    with calling(method, "finish"):
        new = method.finish(round)
        _check_sections(new)
        for section, tensors in new.items():
            old = round.state.get(section)
            if old is None:
                raise FedrolexError(f"section {section!r} is new: declare it in begin(), so that it is saved")
            wrong = next(iter(sorted(set(old) ^ set(tensors))), None)
            if wrong is not None:
                raise FedrolexError(f"section {section!r} must have the tensors it had: look at {wrong!r}")
            for name, tensor in tensors.items():
                if tensor.shape != old[name].shape or tensor.dtype != old[name].dtype:
                    kinds = [f"{each.dtype} {tuple(each.shape)}" for each in (tensor, old[name])]
                    raise FedrolexError(f"{section}:{name} is {kinds[0]} after finish(); it was {kinds[1]}")
    return new


def networks_of(method: Method, setup: Setup) -> dict[str, Network]:
    """The models that clients train, the main one among them."""
    with calling(method, "networks"):
        found = method.networks(setup)
        if not isinstance(found, Mapping) or not all(isinstance(each, Network) for each in found.values()):
            raise TypeError("it must return {name: Network}, each from setup.network(...)")
        _check_names(found)
        if MODEL not in found:
            raise FedrolexError(f"networks() of method {method.name} has no {MODEL!r}, the main one")
    return found


def _check_names(found: Mapping[str, object]) -> None:
    """Raise unless names of sections can be told apart in a checkpoint."""
    wrong = next((name for name in found if not isinstance(name, str) or not name or ":" in name), None)
    if wrong is not None:
        raise FedrolexError(f"a section is called {wrong!r}: use a word without a colon")


def _check_sections(found: object) -> None:
    """Raise TypeError unless these are tensors by section and name."""
    inner = list(found.values()) if isinstance(found, Mapping) else [None]
    if not all(isinstance(part, Mapping) and all(map(_plain, part, part.values())) for part in inner):
        raise TypeError("it must return {section: {name: tensor}}, tensors that have values and are not sparse")


def _plain(name: object, tensor: object) -> bool:
    """Whether a checkpoint can hold a tensor of a name."""
    plain = isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_meta
    return plain and isinstance(name, str)
