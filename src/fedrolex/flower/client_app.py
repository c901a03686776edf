"""The app of a device: what its node is asked, it answers with the recipe's own client work."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedrolex.core import FedrolexError
from fedrolex.flower.capacity import measured
from fedrolex.flower.device import Device
from fedrolex.flower.messages import Asked, Profile
from fedrolex.flower.secure import STEPS, SecureDevice
from fedrolex.flower.settings import Settings, digest
from fedrolex.flower.tensor_versions import TensorVersions
from fedrolex.privacy.identity import Identity
from fedrolex.recipes import Recipe
from fedrolex.runs import Training, prepare
from fedrolex.slicing import exact
from fedrolex.tasks import Task

OwnTask = Task | Callable[[Context], Task]
"""A task, or a function of a node's context that gives it: model, and the node's own data under its number."""


def client_app(recipe: Recipe | None = None, task: OwnTask | None = None) -> ClientApp:
    """A Flower app for devices.

    Args:
        recipe: the run; by default the run-config names it.
        task: model and data of one's own, instead of the recipe's.
    """
    app, known = ClientApp(), dict[tuple[str, int], Training]()

    def training(context: Context) -> tuple[Training, Recipe, str]:
        described = Settings.read(context.run_config).described(recipe)
        key = digest(described)
        whose = key, 0 if task is None else context.node_id
        if whose not in known:
            known[whose] = prepared(described, task, context)
        return known[whose], described, key

    def device(context: Context) -> Device:
        made, described, key = training(context)
        client, transport = number(context), Settings.read(context.run_config).transport
        memory = TensorVersions(context.state, _folder(context, client, key))
        return Device(
            made, client, capacity(context, lambda: made), memory, key,
            transport=transport, checkpoint_every=described.checkpoint_every,
        )  # fmt: skip

    @app.query("profile")
    def profile(message: Message, context: Context) -> Message:
        key = digest(Settings.read(context.run_config).described(recipe))
        held = capacity(context, lambda: training(context)[0])
        return Message(Profile(number(context), held, key).record(), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if Settings.read(context.run_config).secure:
            raise FedrolexError("this run is a secure one: nothing is sent that is not masked")
        return Message(device(context).answer(Asked.read(message.content)).record(), reply_to=message)

    def secured(context: Context) -> SecureDevice:
        settings = Settings.read(context.run_config)
        wanted = context.node_config.get("least", 3)
        if not settings.secure or settings.least < int(wanted):
            raise FedrolexError(f"this device is in sums of at least {wanted} only: see least in the run-config")
        own, known = (context.node_config.get(key) for key in ("identity", "known"))
        identity = Identity(None if own is None else Path(str(own)), None if known is None else Path(str(known)))
        return SecureDevice(
            device(context), context.state, settings.least, settings.threshold, settings.reach, identity
        )

    def answer(step: str) -> Callable[[Message, Context], Message]:
        return lambda message, context: Message(secured(context).answer(step, message.content), reply_to=message)

    for step in STEPS:
        app.train(step)(answer(step))
    return app


def prepared(recipe: Recipe, task: OwnTask | None, context: Context) -> Training:
    """A recipe's training, on its own task or on one given."""
    given = task if isinstance(task, Task) or task is None else task(context)
    return prepare(recipe, given)


def number(context: Context) -> int:
    """The number of a node's client."""
    found = context.node_config.get("client", context.node_config.get("partition-id"))
    if type(found) is not int:
        raise FedrolexError(f"the node has client {found!r}: give it a number, --node-config 'client=0'")
    return found


def capacity(context: Context, training: Callable[[], Training]) -> Fraction:
    """What a node can hold: as its node-config says or, where that says ``auto`` or nothing, as measured."""
    said = context.node_config.get("capacity", "auto")
    return measured(training(), context.node_config) if said == "auto" else exact(str(said))


def _folder(context: Context, client: int, recipe: str) -> Path | None:
    """Where a device keeps tensors from run to run: apart from those of a run by another recipe, given by its hash."""
    folder = context.node_config.get("folder")
    return None if folder is None else Path(str(folder)) / f"client-{client}" / recipe
