"""Flower's Grid in this process: every node is the real ClientApp with a context of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from fedrolex import Run, prepare
from fedrolex.flower import client_app, train_on
from fedrolex.recipes import find_recipe
from fedrolex.runs import checkpoint

Arrives = Message | Callable[[], Message]
"""A message, or how Flower makes one of what came, where that fails."""
Change = Callable[["Nodes", int, Message, Message], Sequence[Arrives]]
"""What becomes of a reply: of (nodes, node, message, reply), what the server gets in its place."""


def as_bytes(content: RecordDict) -> RecordDict:
    """Records as they come out of Flower's bytes."""
    return recorddict_from_proto(recorddict_to_proto(content))


def carried(message: Message) -> Message:
    """A message as it arrives."""
    found = deepcopy(message)
    found.content = as_bytes(message.content)
    return found


class Nodes(Grid):
    """Nodes by id.

    Args:
        app: what every node runs.
        configs: a node-config for every node, by its id.
        run_config: of the app.
        change: what becomes of replies, by node id.
    """

    def __init__(
        self,
        app: ClientApp,
        configs: Mapping[int, Mapping[str, Any]],
        run_config: Mapping[str, Any],
        change: Mapping[int, Change] | None = None,
    ) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # as Flower's runtime sets it
        self.app, self.change = app, dict(change or {})
        self.contexts = {
            node: Context(1, node, dict(config), RecordDict(), dict(run_config)) for node, config in configs.items()
        }
        self.log: list[Message] = []
        self._replies: list[tuple[str, Arrives]] = []  # with the message that the node truly answered
        self._count = 0

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            self._count += 1
            message.metadata.__dict__["_message_id"] = f"m{self._count}"
            ids.append(f"m{self._count}")
            node = message.metadata.dst_node_id
            self.log.append(message)
            if node not in self.contexts:
                continue
            reply = self.reply(carried(message))
            reply = carried(reply) if reply.has_content() else reply
            self.contexts[node].state = as_bytes(self.contexts[node].state)
            replies = self.change[node](self, node, message, reply) if node in self.change else [reply]
            self._replies += [(ids[-1], each) for each in replies]
        return ids

    def reply(self, message: Message) -> Message:
        """What the node of a message answers; an app that fails is an error, as Flower makes it one."""
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:
            return Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = set(message_ids)
        found = [reply for to, reply in self._replies if to in wanted]
        self._replies = [(to, reply) for to, reply in self._replies if to not in wanted]
        return [reply if isinstance(reply, Message) else reply() for reply in found]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


SMALL = ["rounds=3", "task.width=8", "task.limit=180", "fleet.clients=3", "fleet.cohort=3", "callbacks=[drift]",
         'fleet.capacities=["1", "1/2", "1/4"]', "device=cpu", "engine=loop", "evaluate_every=1",
         "checkpoint_every=1"]  # fmt: skip
WHO = {100: "1", 101: "1/2", 102: "1/4"}


@dataclass(frozen=True)
class Done:
    """What a run left: the tensors of its checkpoint, the metrics of its rounds."""

    tensors: dict[str, Tensor]
    rows: list[dict[str, Any]]

    @staticmethod
    def of(folder: Path) -> Done:
        run = Run.open(folder)
        return Done(checkpoint.read(run.checkpoint)[0], run.rows())


def config(folder: Path, *settings: str, **more: Any) -> dict[str, Any]:
    """The run-config of a small run."""
    return {"recipe": "digits", "set": ";".join([*SMALL, *settings]), "out": str(folder), "patience": 5.0, **more}


def fleet(
    folder: Path,
    *settings: str,
    who: Mapping[int, str] = WHO,
    more: Mapping[int, Mapping[str, Any]] | None = None,
    change: Mapping[int, Change] | None = None,
    **run_config: Any,
) -> Nodes:
    """Nodes of these capacities, numbered from 100 on, and more by their own config."""
    configs = {node: {"client": node - 100, "capacity": capacity} for node, capacity in who.items()}
    return Nodes(client_app(), {**configs, **(more or {})}, config(folder, *settings, **run_config), change)


def flower_run(folder: Path, *settings: str, nodes: Nodes | None = None, **run_config: Any) -> Done:
    """A small run on devices, from where its folder stands."""
    nodes = nodes or fleet(folder, *settings, **run_config)
    known = next(iter(nodes.contexts.values())).run_config
    train_on(nodes, Context(1, 0, {}, RecordDict(), {**known, **run_config}))
    return Done.of(folder)


def simulated(folder: Path, *settings: str) -> Done:
    """The same run, its clients simulated."""
    recipe = replace(find_recipe("digits").with_settings([*SMALL, *settings]), compare=False)
    Run.create(folder, recipe).go(prepare(recipe))
    return Done.of(folder)
