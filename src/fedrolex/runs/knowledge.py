"""FedGKT's rounds: edge networks kept by client, one large network at the server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from fedrolex.clients.optimizer import Memory
from fedrolex.core.streams import sample, words
from fedrolex.methods.fedgkt import Edge, batches
from fedrolex.methods.server_round import said
from fedrolex.rounds.client_states import State
from fedrolex.rounds.intake import LATE
from fedrolex.runs.training import Training
from fedrolex.tasks import Classification

COUNT = "@steps"
MEASURED = 10  # clients through whose extractors the server's network is measured


@dataclass
class GroupTraining(Training):
    """A run of FedGKT; ``model`` is the server's network, which takes feature maps.

    What a client keeps is its edge network, its optimiser's memory, and the server's logits for its examples in the
    order in which it stores them. The server trains on what the round's cohort sent.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.task, Classification)
        device = self.task.train.y.device
        kept = {f"{name}@{what}": torch.zeros_like(self.state[name]) for what in KEPT for name in self.trainable}
        self.state = {**kept, COUNT: torch.zeros((), dtype=torch.float64, device=device), **self.state}
        channels = self.task.example().shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(words(1, self.seed, "edge")[0] >> 1))
            self._edge = Edge(channels, self.task.classes).to(device)
        self._first = {name: tensor.clone() for name, tensor in self._edge.state_dict().items()}

    def run_round(self) -> dict[str, Any]:
        """One round; returns its metrics."""
        began = time.perf_counter()
        assert self.states is not None
        losses, failures, sent, new = [], {}, [], {}
        members = self.fleet.members(self.round)
        for member in members:
            if member.part < 1:
                failures[str(member.client)] = LATE
                continue
            own, loss, maps, logits = self._train_edge(member.client)
            if isfinite(loss) and all(bool(t.isfinite().all()) for t in (maps, logits)):
                losses.append(loss)
                sent.append((maps, logits))
                new[member.client] = own
            else:
                failures[str(member.client)] = "sent a value that is not finite"
        void = len(losses) < self.quorum
        counts = {client: len(self.task.client(client)) for client in new}
        state = self.state
        if not void:
            labels = torch.cat([self.task.client(client).y for client in new])
            state, answers = self._train_server(
                torch.cat([m for m, _ in sent]), torch.cat([z for _, z in sent]), labels
            )
            self._check_finite(state)
            for client, logits in zip(new, answers.split(list(counts.values())), strict=True):
                self.states.put(client, self.round, {**new[client], LOGITS: logits})
        classes, area = self.task.classes, sent[0][0][0].numel() if sent else 0
        examples = sum(counts.values())
        metrics = {
            "round": self.round,
            "clients": len(losses),
            "dropped": failures,
            "void": void,
            "train_loss": sum(losses) / len(losses) if losses else None,
            "bytes_down": 4 * examples * classes,
            "bytes_up": examples * (4 * area + 4 * classes + 8),
            "drift": {},
            "seconds": time.perf_counter() - began,
        }
        self.state, self.round = dict(state), self.round + 1
        return metrics

    def _train_edge(self, client: int) -> tuple[State, float, Tensor, Tensor]:
        """A client's round: what it keeps, its loss, its maps and logits."""
        assert self.states is not None
        assert self.method.knowledge is not None
        data, work = self.task.client(client), self.method.client
        own, memory = self._load_edge(self.states.get(client))
        x = self.task.inputs(data.x)
        teacher = None if own is None or LOGITS not in own else own[LOGITS].to(x.device)
        rows = batches(len(data), work.batch, work.epochs, x.device, self.seed, self.round, client)
        loss = self.method.knowledge.learn(
            self._edge, memory, x, data.y, teacher, weight=self.method.knowledge.alpha, batches=rows
        )
        self._edge.eval()
        with torch.no_grad():
            maps, logits = self._edge.features(x), self._edge(x)
        kept = {name: tensor.clone() for name, tensor in self._edge.state_dict().items()}
        kept |= {f"{what}.{i}": t for what in KEPT for i, t in enumerate(getattr(memory, what))} | {COUNT: memory.count}
        return kept, loss, maps, logits

    def _load_edge(self, own: State | None) -> tuple[State | None, Memory]:
        """The edge network as a client has it, and its optimiser's memory."""
        edge = self._first if own is None else {name: own[name] for name in self._first}
        self._edge.load_state_dict(edge)
        memory = Memory.of(list(self._edge.parameters()))
        if own is not None:
            for what in KEPT:
                for i, tensor in enumerate(getattr(memory, what)):
                    tensor.copy_(own[f"{what}.{i}"])
            memory.count.copy_(own[COUNT])
        return own, memory

    def _train_server(self, maps: Tensor, logits: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The server's round: its new tensors, and its logits for every example, in evaluation mode."""
        how = self.method.knowledge
        assert how is not None
        self.axes.load(self.model, self.apart.shared(self.state))
        memory = Memory.of([p for p in self.model.parameters() if p.requires_grad])
        for what in KEPT:
            torch._foreach_copy_(getattr(memory, what), [self.state[f"{name}@{what}"] for name in self.trainable])
        memory.count.copy_(self.state[COUNT])
        rows = batches(len(maps), how.server_batch, how.server_epochs, maps.device, self.seed, self.round, "server")
        how.learn(self.model, memory, maps, labels, logits, weight=how.server_alpha, batches=rows)
        new = {name: tensor.clone() for name, tensor in self.axes.state(self.model).items()}
        for what in KEPT:
            kept = zip(self.trainable, getattr(memory, what), strict=True)
            new |= {f"{name}@{what}": tensor for name, tensor in kept}
        return {**new, COUNT: memory.count}, said(self.model, maps)

    def _evaluate(self) -> dict[str, Any]:
        """The server's network behind the extractors of a few clients that have taken part, mean over them."""
        assert self.states is not None
        assert isinstance(self.task, Classification)
        task = self.task
        self.axes.load(self.model, self.apart.shared(self.state))
        known = [client for client in range(self.fleet.clients) if self.states.has(client)]
        chosen = [known[i] for i in sample(len(known), min(MEASURED, len(known)), 0, "measured").tolist()]
        y, found = task.test.y, []
        for client in chosen or [None]:
            self._load_edge(None if client is None else self.states.get(client))
            self._edge.eval()
            with torch.no_grad():
                maps = self._edge.features(task.inputs(task.test.x))
                own = task.train.x if client is None else task.client(client).x
                seen = self._edge.features(task.inputs(own[:500]))
            scores = said(self.model, maps, seen)
            right = (scores.argmax(1) == y).double()
            held = torch.isin(y, y if client is None else task.labels(task.client(client)))
            found.append((float(task.loss(scores, y)), float(right.mean()), float(right[held].mean())))
        loss, everywhere, at_home = (sum(each) / len(found) for each in zip(*found, strict=True))
        return {"loss": loss, "global_accuracy": everywhere, "local_accuracy": at_home, "statistics": None}

    def restore(self, tensors: Mapping[str, Tensor], round: int) -> None:
        """Go on from a checkpoint."""
        super().restore(tensors, round)
        self.state[COUNT] = self.state[COUNT].double()


KEPT = ("first", "second")
LOGITS = "server's logits"
