"""A client of Flower's simulation: the model and the images stay in the worker process between messages.

A file of its own, so that workers import it once instead of receiving it with every message.
"""

from __future__ import annotations

import json
from functools import lru_cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from work import Work, build, data, rows_of

app = ClientApp()


@lru_cache(maxsize=1)
def ready(words: str) -> tuple[Work, nn.Module]:
    """What a worker keeps."""
    torch.set_num_threads(1)
    work = Work(**json.loads(words))
    return work, build(work).train()


def train(message: Message, context: Context) -> Message:
    """One local epoch."""
    work, model = ready(str(message.content.config_records["config"]["work"]))
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    x, y = (part[rows_of(work, int(context.node_config["partition-id"]))] for part in data(work))
    optimiser = torch.optim.SGD(model.parameters(), lr=work.lr)
    for inputs, targets in zip(x.split(work.batch), y.split(work.batch), strict=True):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimiser.step()
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


app.train()(train)
