"""A sub-model learns, on public examples without labels, what the whole model says."""

import copy

import torch
from torch import Tensor, nn

from fedrolex.core import FedrolexError, random_words
from fedrolex.methods.distillation import Group, Public, scores
from fedrolex.methods.feddf import FedDF
from fedrolex.runs.exports.folder import named_tensors
from fedrolex.tasks import Classification, Task


def distilled(
    student: nn.Module, teacher: nn.Module, task: Task, held: Task, public: Tensor | None, steps: int, seed: int
) -> nn.Module:
    """A copy of a sub-model after learning a teacher's probabilities, by FedDF's teaching: the best look counts.

    Args:
        student: without statistics of static norms.
        teacher: as it is measured.
        task: of classes.
        held: the same, with examples to judge by as its test examples.
        public: inputs as they are stored, ``(n, …)``; None is the task's public examples.
        steps: of 64 examples.
        seed: of the order of examples.
    """
    if not isinstance(task, Classification) or not isinstance(held, Classification):
        raise FedrolexError(f"distillation compares scores of classes, not those of {task.name}")
    if public is None:
        if task.public is None:
            remedy = "give a set or a folder of images with --public"
            raise FedrolexError(f"there are no public examples to distil on: {remedy}")
        public = task.public.x
    if public.shape[1:] != task.train.x.shape[1:] or public.dtype != task.train.x.dtype:
        kinds = [f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape[1:])}" for x in (public, task.train.x)]
        raise FedrolexError(f"public examples are {kinds[0]} a row, those of the task {kinds[1]}: give the same")
    inputs = task.inputs(public.to(task.train.x.device))
    group = Group(copy.deepcopy(student), {}, {n: t.detach().clone() for n, t in named_tensors(student).items()})
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(int(random_words(1, seed, "export")[0] >> 1))
        target = scores(teacher, inputs).softmax(1)
        method = FedDF(steps=steps, patience=max(1, steps))
        taught = method.taught(group, target, Public(inputs, seed), held.inputs(held.test.x), held.test.y)
    return group.load(taught).eval()
