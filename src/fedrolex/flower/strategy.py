"""Flower's own interface to a server's side, for apps that bring their own loop.

:func:`~fedrolex.flower.server_app.train_on` has a loop of this package, with checkpoints and metrics. A strategy is for
whoever calls ``strategy.start(grid, ...)``, or wraps strategies; rounds are counted by the training, so that windows go
on where it stands.
"""

from collections.abc import Iterable, Mapping, Sequence

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedrolex.clients import MODEL, Job, RoundPlan
from fedrolex.core import FedrolexError
from fedrolex.flower.engine import Devices, on_devices
from fedrolex.flower.exchange import answers
from fedrolex.flower.settings import Settings
from fedrolex.recipes import Recipe
from fedrolex.runs import Training
from fedrolex.runs.hooks import awaited_of, jobs_of


class Given(Devices):
    """Devices whose replies somebody else has fetched."""

    sent: Sequence[Message] = ()
    came: Sequence[Message] = ()

    def replies(self, plan: RoundPlan, asked: Mapping[int, tuple[Message, list[Job]]]) -> Mapping[int, Message]:
        """The first reply to each message that was sent, by node; others are strays."""
        nodes = {message.metadata.message_id: message.metadata.dst_node_id for message in self.sent}
        found: dict[int, Message] = {}
        for reply in self.came:
            to = reply.metadata.reply_to_message_id
            if to in nodes and nodes[to] not in found and answers(reply, to, nodes[to]):
                found[nodes[to]] = reply
            else:
                self.stray(plan, reply)
        return found


class SubModelStrategy(Strategy):
    """A training as a Flower strategy.

    Args:
        training: as :func:`fedrolex.prepare` makes it.
        recipe: it was made from.
        settings: how messages are carried; ``secure`` takes several messages a round, and is not for strategies.
    """

    def __init__(self, training: Training, recipe: Recipe, settings: Settings) -> None:
        if settings.secure:
            raise FedrolexError(
                "secure sums take four messages a round, a strategy has one: use server_app or train_on"
            )
        self.training, self.recipe, self.settings = training, recipe, settings
        self.rows: list[dict[str, object]] = []
        self._engine: Given | None = None

    def arrays(self) -> ArrayRecord:
        """The server's model as it stands."""
        state = self.training.server.state[MODEL]
        return ArrayRecord({name: Array(tensor.detach().cpu().numpy()) for name, tensor in state.items()})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A message for every device of the next round, with its own part of the model."""
        method, server = self.training.method, self.training.server
        if self._engine is None:
            self._engine = on_devices(self.training, grid, self.recipe, self.settings, Given)
        plan = self.training.plan(awaited_of(method, jobs_of(method, server, server.round)))
        self._engine.sent = [message for message, _ in self._engine.asked(plan).values()]
        return self._engine.sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check and average what came back."""
        assert self._engine is not None
        self._engine.came = list(replies)
        row = self.training.run_round()
        self.rows.append(row)
        told = {key: row[key] for key in ("clients", "bytes_down", "bytes_up")}
        return self.arrays(), MetricRecord({**told, "dropped": len(row["dropped"])})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: the server evaluates."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The server's own metrics, as far as they are numbers."""
        found = self.training.evaluate()
        return MetricRecord({key: value for key, value in found.items() if isinstance(value, int | float)})

    def summary(self) -> None:
        """Say what is trained."""
        self.training.say(f"method {self.recipe.method.name} on {self.training.server.task.name}, over Flower")
