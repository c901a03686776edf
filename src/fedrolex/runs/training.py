"""A training run: round after round, from the first or from a checkpoint."""

import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fedrolex.clients import MODEL, Failure, Job, LocalTraining, Origin, RoundPlan, Summing, Upload
from fedrolex.core import ENGINES, FedrolexError
from fedrolex.core.threads import spread_over, threads_for
from fedrolex.engines.cpu.loop import Loop
from fedrolex.methods import Method
from fedrolex.rounds import Average, ClientStates, Engine, Round, Server, State, WeightMean, out_of_memory
from fedrolex.rounds.finite import not_finite
from fedrolex.rounds.refusal import refusal
from fedrolex.rounds.server import flat, sections
from fedrolex.rounds.weight_mean import with_means
from fedrolex.runs.callbacks import Callback, CallbackError, tell
from fedrolex.runs.hooks import awaited_of, begun, calling, finished, jobs_of, reported, sent_to
from fedrolex.slicing import one_line
from fedrolex.tasks import Measure

LATE = "managed only a part of its work (fleet.stragglers)"


def to_stderr(line: str) -> None:
    """Tell the user something."""
    print(line, file=sys.stderr)


@dataclass
class Training:
    """Everything a run is made of, and where it stands.

    Attributes:
        server: data, fleet, networks, and the tensors the run stands at.
        method, work, engine: how, what clients do, and on what.
        quorum: fewest clients with good answers that make a round count.
        deadline: seconds a client may take.
        measure: how the model is evaluated.
        callbacks: told of what happens.
        mean: of the server's weights over rounds, which is judged in their place.
        say: tells the user something, in one line.
        origin: how another process makes the run; None where none can.
    """

    server: Server
    method: Method
    work: LocalTraining
    engine: Engine
    quorum: int = 1
    deadline: float | None = None
    measure: Measure = field(default_factory=Measure)
    callbacks: Sequence[Callback] = ()
    mean: WeightMean = field(default_factory=WeightMean)
    say: Callable[[str], None] = to_stderr
    origin: Origin | None = None

    def __post_init__(self) -> None:
        server, method = self.server, self.method
        with calling(method, "view"):
            server.view = self._view = method.view(server.task)
        with calling(method, "windows"):
            server.scheme = method.windows(server)
        server.state |= begun(method, server)
        self._begin_mean()
        if method.needs.client_state and server.clients is None:
            server.clients = ClientStates()
        with calling(method, "label_axis"):
            self.label_axis = method.label_axis(server)
        self._parameters = max(sum(p.numel() for p in n.module.parameters()) for n in server.networks.values())
        self._loop: Loop | None = None
        self._ran: dict[Engine, None] = {}
        self._refused: str | None = None
        self._coming: dict[int, list[Job]] = {}

    # --- a round ---

    def run_round(self) -> dict[str, Any]:
        """One round; returns its metrics. A round below the quorum is void, and the window still advances."""
        with spread_over(threads_for(self._parameters)):
            return self._run_round()

    def _run_round(self) -> dict[str, Any]:
        began = time.perf_counter()
        server, method = self.server, self.method
        jobs = self._coming.pop(server.round, None) or jobs_of(method, server, server.round)
        self._coming.clear()
        plan = self.plan(awaited_of(method, jobs))
        round, taken, failures = self._gather(plan)
        sent = {job.key: job for job in plan.jobs}
        failures |= {str(job.client): LATE for job in jobs if job.key not in sent}
        with calling(method, "traffic"):
            carried = round.average.engine.carried
            traffic = [
                carried.get(job.key) or method.traffic(server, sent.get(job.key, job), taken.get(job.key))
                for job in jobs
            ]
            if not all(isinstance(size, int) for pair in traffic for size in pair):
                raise TypeError("it must return two whole numbers, bytes")
            down, up = sum(down for down, _ in traffic), sum(up for _, up in traffic)
        losses = [upload.loss for upload in taken.values()]
        clients = {upload.job.client for upload in taken.values()}
        row: dict[str, Any] = {
            "round": server.round,
            "clients": len(clients),
            "dropped": failures,
            "void": len(clients) < self.quorum,
            "train_loss": sum(losses) / len(losses) if losses else None,
            "bytes_down": down,
            "bytes_up": up,
            "macs": self._macs(taken.values()),
            **round.average.engine.remarks,
        }
        if not row["void"]:
            new = self._finished(round)
            tell(self.callbacks, "round_ends", round, new, row)
            self._commit(round, new)
        server.round += 1
        row["seconds"] = time.perf_counter() - began
        return row

    def plan(self, jobs: Sequence[Job]) -> RoundPlan:
        """The client work of the next round, with what the server sends and what clients kept."""
        server = self.server
        equipped = [replace(job, sent=sent_to(self.method, server, job), kept=self._kept(job)) for job in jobs]
        return RoundPlan(
            server.round,
            server.seed,
            server.networks,
            server.state,
            server.view,
            self.work,
            equipped,
            self.deadline,
            self.label_axis is not None,
            self._jobs_of,
            self._summing(),
            self._origin(),
            self.engine.precision,
        )

    def _summing(self) -> Summing | None:
        """How an engine adds up answers itself; None where the method looks at each."""
        if not self.method.only_adds:
            return None
        return Summing(self.method.weight, self.label_axis, any(callback.drift for callback in self.callbacks))

    def _origin(self) -> Origin | None:
        """How another process makes this run, with the task as clients see it now."""
        if self.origin is None or self.server.view is self._view:
            return self.origin
        return replace(self.origin, view=self.server.view)

    def _kept(self, job: Job) -> Mapping[str, Tensor] | None:
        """What a client kept for a job, on the server's device."""
        found = self.server.clients.get(job.client) if self.server.clients is not None else None
        mine = job.name and f"{job.name}:"
        own = {name.removeprefix(mine): tensor for name, tensor in (found or {}).items() if name.startswith(mine)}
        return {name: tensor.to(self.server.device) for name, tensor in own.items()} or None

    def _jobs_of(self, round: int) -> list[Job]:
        """The jobs of a round; those of the next one are kept until then."""
        if round != self.server.round + 1:
            return jobs_of(self.method, self.server, round)
        if round not in self._coming:
            self._coming[round] = jobs_of(self.method, self.server, round)
        return self._coming[round]

    def _gather(self, plan: RoundPlan) -> tuple[Round, dict[tuple[int, str], Upload], dict[str, str]]:
        """Have the clients trained; the round, the answers that were taken, and why others were not, by client."""
        engine = self._engine_for(plan)
        answers = self._answers(engine, plan)
        first = next(answers, None)  # whether answers stay good is known once the engine has begun
        average = Average(plan, engine, label_axis=self.label_axis)
        current = Round(self.server, plan, average)
        average.seen = lambda uploads: tell(self.callbacks, "folded", current, uploads)
        tell(self.callbacks, "round_begins", current)
        taken: dict[tuple[int, str], Upload] = {}
        failures: dict[str, str] = {}
        answers = answers if first is None else chain([first], answers)
        del first  # its tensors' memory may be needed before the last answer is there
        for answer in answers:
            why = answer.why if isinstance(answer, Failure) else self._refuse_or_take(current, answer)
            if why is not None:
                failures[str(answer.job.client)] = why
            elif isinstance(answer, Upload):
                taken[answer.job.key] = replace(answer, tensors={})
            del answer  # before the next client is trained, which may need its memory
        return current, taken, failures

    def _macs(self, uploads: Iterable[Upload]) -> int | None:
        """What clients computed for their answers: forward, and twice that backward; None where it is not known."""
        total = 0
        for upload in uploads:
            one = self.server.macs(upload.job)
            if one is None:
                return None
            total += 3 * one * min(upload.steps * self.work.batch, upload.examples * self.work.epochs)
        return total

    @staticmethod
    def _answers(engine: Engine, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """One answer a job; an engine that fails, or client work that calls sys.exit(), stops the run in one line."""
        waiting = {job.key: job for job in plan.jobs}
        with reported(f"engine {label(engine)} failed"):
            for answer in engine.run(plan):
                if not isinstance(answer, Upload | Failure) or waiting.pop(answer.job.key, None) is None:
                    raise TypeError("run() must give an Upload or a Failure, one for every job of the plan")
                yield answer
                del answer  # before the next client is trained, which may need its memory
        for job in waiting.values():
            yield Failure(job, "the engine gave no answer")

    def _engine_for(self, plan: RoundPlan) -> Engine:
        """The run's engine, or ``loop`` where the engine says that it cannot run the client work."""
        with reported(f"engine {label(self.engine)} failed"):
            why = self.engine.supports(plan)
            if not isinstance(why, str | None):
                raise TypeError(f"supports() gives {why!r}: give the reason against it in words, or None")
        if why is None:
            self._ran[self.engine] = None
            return self.engine
        if why != self._refused:
            self._refused = why
            self.say(f"engine: loop ({why})")
        if self._loop is None:
            self._loop = Loop(precision=self.engine.precision, device=self.engine.device)
        self._ran[self._loop] = None
        return self._loop

    @property
    def ran(self) -> str:
        """The engines that rounds ran on, or would."""
        return ", ".join(dict.fromkeys(label(engine) for engine in self._ran or [self.engine]))

    def _refuse_or_take(self, round: Round, upload: Upload) -> str | None:
        """Why an answer is not taken, or None."""
        why = refusal(round.plan, upload)
        if why is not None:
            return why
        round.average.offer(upload)
        if upload.kept and self.server.clients is None:
            remedy = "say needs = Needs(client_state=True) in the class"
            raise FedrolexError(f"clients of method {self.method.name} keep tensors between rounds: {remedy}")
        with calling(self.method, "take"):
            try:
                self.method.take(round, upload)
            except CallbackError:
                raise
            except FedrolexError as error:
                return str(error)
            except Exception as error:
                if not round.average.engine.foreign or out_of_memory(error):
                    raise
                return f"sent what the method cannot take: {one_line(error)}"
        round.taken.append(upload.job)
        if upload.kept is not None:
            mine = upload.job.name and f"{upload.job.name}:"
            round.remember(upload.job.client, {f"{mine}{name}": tensor for name, tensor in upload.kept.items()})
        return None

    def _finished(self, round: Round) -> State:
        """The sections that a round changes, known to be finite."""
        new = finished(self.method, round)
        for section, tensors in new.items():
            old = self.server.state.get(section, {})
            fresh = {n: t for n, t in tensors.items() if t is not old.get(n) and not round.average.vouches_for(t)}
            broken = not_finite(fresh)
            if broken is not None:
                what = f"{section}:{broken} is no longer finite after the server's step"
                raise FedrolexError(f"round {round.number}: {what}")
        return new

    def _commit(self, round: Round, new: State) -> None:
        """The round counts: the server takes its new tensors, clients keep what they keep."""
        state = {**self.server.state, **new}
        self.server.state = {**state, **self.mean.moved(state)}
        if self.server.clients is not None:
            for client, tensors in round.kept.items():
                before = self.server.clients.get(client) or {}
                self.server.clients.put(client, round.number, {**before, **tensors})

    # --- what comes of it ---

    @property
    def judged(self) -> Server:
        """The server as it is judged: with the means of its weights, where these are kept."""
        found = copy.copy(self.server)
        found.state = with_means(found.state)
        return found

    def _begin_mean(self) -> None:
        if self.mean.rounds > 1:
            with calling(self.method, "weights"):
                self.server.state |= self.mean.begin(self.server.state, self.method.weights(self.server))

    def evaluate(self) -> dict[str, Any]:
        """How good the model is now."""
        try:
            with spread_over(threads_for(self._parameters)):
                found = {**self.method.evaluate(self.judged, self.measure)}
            for name, value in found.items():
                if name.endswith("accuracy") and not isinstance(value, int | float | None):
                    raise FedrolexError(f"task {self.server.task.name} gives {name} {value!r}: give a number")
            return found
        except ValueError as error:  # a batch norm that was given a single value a channel
            raise FedrolexError(f"the model could not be evaluated: {one_line(error)}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, RuntimeError, SystemExit) as error:
            if not out_of_memory(error):
                judged = f"the model that method {self.method.name} judges"
                raise FedrolexError(f"{judged} could not be evaluated: {one_line(error)}") from error
            if not self.engine.release():
                raise
        return self.evaluate()  # with the memory that the engine gave back

    # --- checkpoints ---

    def tensors(self) -> dict[str, Tensor]:
        """The server's state as one mapping, for a checkpoint."""
        return flat(self.server.state)

    def restore(self, tensors: Mapping[str, Tensor], round: int) -> None:
        """Go on from a checkpoint: the tensors of this run, by name, shape and type, and finite."""
        state, device = sections(tensors), self.server.device
        for section in {**self.server.state, **state}:
            own, found = self.server.state.get(section, {}), state.get(section, {})
            wrong = next(iter(sorted(set(own) ^ set(found))), None)
            wrong = wrong or next((n for n, t in own.items() if found[n].shape != t.shape), None)
            if wrong is not None:
                raise FedrolexError(f"the checkpoint does not fit this run: tensor {section}:{wrong}")
            for name, tensor in own.items():
                kinds = found[name].dtype, tensor.dtype
                if kinds[0] != kinds[1]:
                    raise FedrolexError(f"{section}:{name} is {kinds[0]} in the checkpoint; this run has {kinds[1]}")
                if not_finite({name: found[name]}) and not not_finite({name: tensor}):
                    raise FedrolexError(f"{section}:{name} is not finite in the checkpoint: start a new run")
        self.server.state = {
            section: {name: state[section][name].to(device) for name in own}
            for section, own in self.server.state.items()
        }
        self.server.round = round

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin with given weights: plain ones are the main network's; a checkpoint's may be of other sections, too."""
        for section in self.server.networks:
            self._start_section(section, tensors)
        self.server.state |= begun(self.method, self.server)
        for section in self.server.state:
            if "@" in section:  # a capacity's own
                self._start_section(section, tensors)
        self._begin_mean()
        for key in tensors:
            section, name = key.split(":", 1) if ":" in key else (MODEL, key)
            network = self.server.networks.get(section)  # what a method remembers is no weights
            known = (
                network is None or "@" in name or name in {*self.server.state[section], *network.module.state_dict()}
            )
            if not known:
                raise FedrolexError(f"there is a tensor {key!r}, which this model has not: the weights do not fit")

    def _start_section(self, section: str, tensors: Mapping[str, Tensor]) -> None:
        """Give a section its tensors; only the main network's must be there."""
        own = self.server.state[section]
        plain = tensors if section == MODEL else {}
        known = {name: tensors.get(f"{section}:{name}", plain.get(name)) for name in own}
        given = {name: tensor for name, tensor in known.items() if tensor is not None}
        missing = next((name for name in own if name not in given), None)
        if missing is not None and (given or section == MODEL):
            raise FedrolexError(f"there is no tensor {missing!r}: the weights do not fit this model")
        for name, tensor in given.items():
            if _kind(tensor) != _kind(own[name]):
                raise FedrolexError(f"tensor {name!r} is {tensor.dtype}; this model's is {own[name].dtype}")
            if not_finite({name: tensor.to(own[name].dtype)}) and not not_finite({name: own[name]}):
                raise FedrolexError(f"tensor {name!r} is not finite: nothing can be trained from it")
        self.server.networks.get(section, self.server.main).axes.check_whole(given)
        for name, tensor in given.items():
            own[name].copy_(tensor)


def _kind(tensor: Tensor) -> tuple[bool, bool, bool]:
    """What a tensor's numbers are, whatever their precision: real, complex, truth values, or none of these."""
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype == torch.bool


def label(engine: Engine) -> str:
    """What an engine is called in reports."""
    return str(getattr(engine, "label", None) or ENGINES.name_of(type(engine)))
