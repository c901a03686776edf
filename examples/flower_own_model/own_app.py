"""A model and data of one's own: every device reads its own examples, the server those it tests on."""

import torch
from torch import nn

from fedrolex import Examples, FleetRecipe, Recipe
from fedrolex.flower import client_app, own_data, server_app

CLIENTS = 3
recipe = Recipe(rounds=3, quorum=2, fleet=FleetRecipe(clients=CLIENTS, cohort=CLIENTS, capacities=["1", "1/2", "1/4"]))


def model(scale):
    return nn.Sequential(nn.Linear(20, 64 * scale), nn.ReLU(), nn.Linear(64 * scale, 3))


def task(context):
    client = context.node_config.get("client")  # None at the server
    draw = torch.Generator().manual_seed(99 if client is None else client)  # in the place of your own files
    x = torch.randn(300, 20, generator=draw)
    y = x[:, :3].argmax(1)
    return own_data(model, Examples(x, y), clients=CLIENTS, client=client, classes=3)


client = client_app(recipe, task)
server = server_app(recipe, task)
