"""A model and data of one's own: every device reads its own examples, the server those it tests on."""

import torch
from flwr.app import Context
from torch import nn

from fedrolex import Examples, FleetRecipe, Recipe, Task
from fedrolex.flower import client_app, own_data, server_app

CLIENTS = 3
recipe = Recipe(rounds=3, quorum=2, fleet=FleetRecipe(clients=CLIENTS, cohort=CLIENTS, capacities=["1", "1/2", "1/4"]))


def model(scale: int) -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64 * scale), nn.ReLU(), nn.Linear(64 * scale, 3))


def task(context: Context) -> Task:
    number = context.node_config.get("client")  # None at the server
    me = None if number is None else int(number)
    draw = torch.Generator().manual_seed(99 if me is None else me)  # in the place of your own files
    x = torch.randn(300, 20, generator=draw)
    y = x[:, :3].argmax(1)
    return own_data(model, Examples(x, y), clients=CLIENTS, client=me, classes=3)


client = client_app(recipe, task)
server = server_app(recipe, task)
