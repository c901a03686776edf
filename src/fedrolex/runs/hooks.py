"""A method's hooks as the training loop calls them: what goes wrong inside is one line, what they give is checked."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from fedrolex.clients import MODEL, Job
from fedrolex.core import FedrolexError
from fedrolex.methods.method import Method
from fedrolex.rounds import Round, Server, State, out_of_memory
from fedrolex.slicing import one_line


@contextmanager
def calling(method: Method, hook: str) -> Iterator[None]:
    """Inside, a hook of a method: what it raises becomes one line that names it; a lack of memory stays one."""
    try:
        yield
    except FedrolexError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        said = f"{type(error).__name__}: {one_line(error)}"
        raise FedrolexError(f"{hook}() of method {method.name} failed: {said}") from error


def begun(method: Method, server: Server) -> State:
    """The sections that a method adds to the server's state."""
    with calling(method, "begin"):
        state = method.begin(server)
        _check_sections(state)
    if MODEL in state:
        raise FedrolexError(f"begin() of method {method.name} returns a section {MODEL!r}, which the model has")
    return state


def jobs_of(method: Method, server: Server, round: int) -> list[Job]:
    """The jobs of a round; each is of a known network, and its client has no other of its name."""
    with calling(method, "jobs"):
        found, keys = method.jobs(server, round), set()
        for job in found:
            if job.network not in server.networks or not all(section in server.state for section in job.sections):
                asked = f"asks for network {job.network!r} with sections {', '.join(job.sections)}"
                raise FedrolexError(f"jobs() of method {method.name} {asked}: the run has {', '.join(server.state)}")
            if job.key in keys:
                twice = f"gives client {job.client} two jobs of one name: tell them apart with Job(..., name=...)"
                raise FedrolexError(f"jobs() of method {method.name} {twice}")
            keys.add(job.key)
    return found


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


def _check_sections(found: object) -> None:
    """Raise TypeError unless these are tensors by section and name."""
    inner = list(found.values()) if isinstance(found, Mapping) else [None]
    if not all(isinstance(part, Mapping) and all(isinstance(t, Tensor) for t in part.values()) for part in inner):
        raise TypeError("it must return {section: {name: tensor}}")
