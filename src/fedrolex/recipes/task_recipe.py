"""What is learned, as a recipe says it: images or words."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedrolex.clients.work import Mask
from fedrolex.core.errors import FedrolexError
from fedrolex.data.get import find_source, lacking
from fedrolex.data.images import ImageSet, load_images
from fedrolex.data.users import Users, open_users
from fedrolex.data.vocabulary import Vocabulary
from fedrolex.models import VGG, ConvNet, LeNet, ResNet, WordTransformer, preresnet18, preresnet34
from fedrolex.models.represented import Represented
from fedrolex.recipes.decode import one_of
from fedrolex.rounds.fleet import Fleet
from fedrolex.slicing.windows import exact
from fedrolex.tasks.classification import Classification
from fedrolex.tasks.partition import (
    Affinity,
    Partition,
    by_label,
    dirichlet,
    even,
    heterofl,
    hold_out,
    rare_classes,
    shards,
)
from fedrolex.tasks.pixels import Pixels
from fedrolex.tasks.task import Examples, Task
from fedrolex.tasks.words import NextWord, choose_users, count_words, read_sentences

PARTITIONS = ("iid", "labels", "heterofl", "dirichlet", "shards")
RESNETS = {"resnet8": 8, "resnet14": 14, "resnet20": 20, "resnet32": 32}
MODELS = ("auto", "convnet", "lenet", *RESNETS, "vgg11", "preresnet18", "preresnet34")
SHAPES = {"digits": (10, 1, 8), "cifar10": (10, 3, 32), "cifar100": (100, 3, 32), "fashion-mnist": (10, 1, 28)}
SLICES = ("attn", "attn+ffn", "all")
TEXTS = ("stackexchange", "blogs", "stackoverflow")


@dataclass(frozen=True, kw_only=True)
class PartitionRecipe:
    """How examples are spread over clients.

    Attributes:
        name: ``iid``; ``labels``: exactly ``labels`` a client; ``heterofl``: at most ``labels``, as published,
            with unused data; ``dirichlet``: by ``alpha``; ``shards``: ``labels`` shards a client.
        labels: labels (or shards) a client.
        alpha: concentration of the Dirichlet draw.
        smallest: fewest examples a client may have in a Dirichlet draw.
        balanced: whether that draw stops giving to clients that have their fair share.
        rare: classes that belong to the small devices.
        rare_capacity: the largest capacity of a small device.
        rare_elsewhere: what the others get of the rare classes, compared with a small device: 0 is nothing.
    """

    name: str = "iid"
    labels: int = 2
    alpha: float = 0.5
    smallest: int = 10
    balanced: bool = True
    rare: list[int] = field(default_factory=list)
    rare_capacity: str = "1/8"
    rare_elsewhere: float = 0.0

    def __post_init__(self) -> None:
        one_of("task.partition.name", self.name, PARTITIONS)
        exact(self.rare_capacity)
        if self.labels < 1:
            raise FedrolexError(f"task.partition.labels is {self.labels}: give 1 or more")
        if not 0 < self.alpha <= 1e9:
            raise FedrolexError(f"task.partition.alpha is {self.alpha}: give a number above 0, at most 1e9")
        if self.smallest < 0:
            raise FedrolexError(f"task.partition.smallest is {self.smallest}: give 0 or more")
        if self.rare and self.name in ("heterofl", "shards"):
            raise FedrolexError(
                f"task.partition.rare needs a partition that can follow it (iid, labels, dirichlet), not {self.name}"
            )

    def split(
        self, y: Tensor, test_y: Tensor, classes: int, fleet: Fleet, server: int, seed: int
    ) -> tuple[Partition, Partition | None]:
        """Rows of the training examples for each client and, where the partition has them, of the test set."""
        who, affinity = fleet.clients, self._affinity(classes, fleet, server)
        match self.name:
            case "heterofl":
                return heterofl(y, test_y, classes, who, self.labels, seed)
            case "labels":
                return by_label(y, classes, who, self.labels, seed, affinity), None
            case "dirichlet":
                return dirichlet(
                    y, who, self.alpha, seed, smallest=self.smallest, balanced=self.balanced, affinity=affinity
                ), None
            case "shards":
                return shards(y, who, self.labels, seed), None
        return even(y, who, seed, affinity), None

    def _affinity(self, classes: int, fleet: Fleet, server: int) -> Affinity | None:
        if not self.rare:
            return None
        if fleet.redrawn:
            raise FedrolexError("task.partition.rare ties data to capacities: it needs fleet.redrawn=false")
        limit = exact(self.rare_capacity) / server
        small = [fleet.capacity(client) <= limit for client in range(fleet.clients)]
        return rare_classes(fleet.clients, classes, small, self.rare, self.rare_elsewhere)


@dataclass(frozen=True, kw_only=True)
class ImagesRecipe:
    """Images of classes.

    Attributes:
        name: ``images``.
        data: ``digits``, ``cifar10``, ``cifar100``, ``fashion-mnist``, or the path of a folder of images.
        model: ``convnet``, ``lenet``, ``resnet8`` to ``resnet32``, ``vgg11``, ``preresnet18``, ``preresnet34``;
            ``auto`` is convnet for digits, else preresnet18.
        models: by capacity, what its clients train instead of a part of ``model``, for methods that bring models
            together by what they say: ``vgg11``, or ``vgg11:16`` with a width.
        width: of the largest client's ``model``; null is its own (32 for convnet, 6 for lenet, 16 for ResNets, 64 for
            VGG and PreResNets).
        norm: of ResNets, VGG and PreResNets: ``static``, ``batch``, ``group``, ``none``.
        scaler: HeteroFL's scaler, in a PreResNet.
        representation: size of a layer before the last that is the same at every width; null is none, or 64 for fedet,
            which needs one.
        augment: shift by up to four pixels and mirror while training; null is yes for CIFAR.
        standardise: shift and scale every channel to mean 0 and standard deviation 1; otherwise pixels are from 0 to
            1. Null is yes for all but digits.
        partition: how the images are spread.
        validation, public: shares of the training images put aside first, for methods that distil; ``public`` may also
            be another set's name or a folder of images, whose labels nobody looks at. Null is a tenth for methods
            that need it, else none.
        limit: use only so many training images (a random choice), or null; and as many test images at most.
    """

    name: str = "images"
    data: str = "digits"
    model: str = "auto"
    models: dict[str, str] = field(default_factory=dict)
    width: int | None = None
    norm: str = "static"
    scaler: bool = False
    representation: int | None = None
    augment: bool | None = None
    standardise: bool | None = None
    partition: PartitionRecipe = field(default_factory=PartitionRecipe)
    validation: float | None = None
    public: float | str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        one_of("task.model", self.model, MODELS)
        for capacity, name in self.models.items():
            self._own(capacity, name)
        if len({exact(capacity) for capacity in self.models}) < len(self.models):
            raise FedrolexError(f"task.models has two models for one capacity: {', '.join(self.models)}")
        one_of("task.norm", self.norm, ("static", "batch", "group", "none"))
        for name in ("width", "limit", "representation"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise FedrolexError(f"task.{name} is {value}: give 1 or more, or null")

    def _made(self, shape: tuple[int, int, int], scale: int = 1) -> nn.Module:
        """The model for (classes, channels, height and width) of the images, ``scale`` times as wide."""
        classes, channels, size = shape
        if self.representation is not None:
            trunk = replace(self, representation=None)._made((self.representation, channels, size), scale)
            return Represented(trunk, self.representation, classes)
        name = ("convnet" if self.data == "digits" else "preresnet18") if self.model == "auto" else self.model
        norm: Any = self.norm
        if name == "convnet":
            return ConvNet(classes, channels, (size, size), (self.width or 32) * scale)
        if name == "lenet":
            if size < 16:
                raise FedrolexError(f"task.model lenet needs images of at least 16 × 16, not {size} × {size}")
            return LeNet(classes, channels, size, (self.width or 6) * scale)
        if name in RESNETS:
            return ResNet(RESNETS[name], classes, channels, size, (self.width or 16) * scale, norm)
        width = (self.width or 64) * scale
        if name == "vgg11":
            return VGG(classes, channels, size, width, norm)
        make = preresnet18 if name == "preresnet18" else preresnet34
        return make(classes, channels=channels, width=width, norm=norm, scaler=self.scaler, size=size)

    def _own(self, capacity: str, text: str) -> ImagesRecipe:
        """The recipe of a model that clients of one capacity train."""
        name, colon, width = text.partition(":")
        one_of(f"task.models[{capacity}]", name, MODELS[1:])
        if colon and not (width.isascii() and width.isdigit() and int(width)):
            raise FedrolexError(
                f"task.models[{capacity}] is {text!r}: give a model, or a model and its width: {name}:16"
            )
        return replace(self, model=name, models={}, width=int(width) if colon else None)

    def make_model(self, scale: int = 1) -> nn.Module:
        """The server's model; needs no data, except for a folder of images."""
        shape = SHAPES.get(self.data)
        return self._made(_shape(load_images(self.data, Path())) if shape is None else shape, scale)

    def make_models(self) -> dict[Fraction, nn.Module]:
        """The models that clients of some capacities have instead."""
        return {exact(capacity): self._own(capacity, name).make_model() for capacity, name in self.models.items()}

    def frozen_axes(self) -> Sequence[str]:
        """Axes that capacities do not cut."""
        return ()

    def _others(self, images: ImageSet, folder: Path, seed: int) -> Examples | None:
        """Images of another set, for distillation; of this one, nobody may look at the test images."""
        if not isinstance(self.public, str):
            return None
        if self.public == self.data:
            raise FedrolexError(f"task.public is {self.public!r}, which is what is learned: give a share, e.g. 0.1")
        others = load_images(self.public, folder, seed)
        if others.train_x.shape[1:] != images.train_x.shape[1:]:
            shapes = [tuple(each.train_x.shape[1:]) for each in (others, images)]
            raise FedrolexError(f"task.public {self.public!r} has images of shape {shapes[0]}, the task {shapes[1]}")
        return Examples(others.train_x, others.train_y)

    def build(self, fleet: Fleet, server: int, seed: int, folder: Path, mask: Mask) -> Task:
        """The task, spread over the clients of a fleet whose server is so many times wider than the task's model."""
        images = load_images(self.data, folder, seed)
        shape = _shape(images)
        classes = shape[0]
        aside = 0.0 if isinstance(self.public, str) else self.public or 0.0
        held = hold_out(len(images.train_y), {"validation": self.validation or 0.0, "public": aside}, seed)
        whole, test = Examples(images.train_x, images.train_y), Examples(images.test_x, images.test_y)
        train = whole.rows(held["rest"]) if self.validation or aside else whole
        if self.limit is not None:
            train, test = _some(train, self.limit, seed), _some(test, self.limit, seed)
        parts, test_parts = self.partition.split(train.y, test.y, classes, fleet, server, seed)
        crops = self.data in ("cifar10", "cifar100") if self.augment is None else self.augment
        digits = self.data == "digits"
        standard = not digits if self.standardise is None else self.standardise
        mean, std = (images.mean, images.std) if standard else ((0.0,), (240 / 255 if digits else 1.0,))
        return Classification(
            name=self.data,
            build=lambda scale: self._made(shape, scale),
            build_for=lambda channels, scale: self._made((classes, channels, shape[2]), scale),
            models={
                capacity: partial(self._own(capacity, name)._made, shape) for capacity, name in self.models.items()
            },
            train=train,
            test=test,
            parts=parts,
            test_parts=test_parts,
            pixels=Pixels.of(mean, std, 4 if crops else 0, crops),
            validation=whole.rows(held["validation"]) if self.validation else None,
            public=whole.rows(held["public"]) if aside else self._others(images, folder, seed),
            rare=self.partition.rare,
            mask="neg_inf" if mask == "none" else mask,
            classes=classes,
        )


def _shape(images: ImageSet) -> tuple[int, int, int]:
    _, channels, height, width = images.train_x.shape
    if height != width:
        raise FedrolexError(f"the images are {height} high and {width} wide: the bundled models take square ones")
    return len(images.classes), channels, height


def _some(examples: Examples, count: int, seed: int) -> Examples:
    return examples.rows(hold_out(len(examples), {"kept": min(count / len(examples), 1 - 1e-9)}, seed)["kept"])


@dataclass(frozen=True, kw_only=True)
class WordsRecipe:
    """Next-word prediction, users as clients.

    Attributes:
        name: ``words``.
        data: ``stackexchange``, ``blogs``, ``stackoverflow``, or the path of a file (.jsonl, .npz, .h5, .sqlite).
        vocabulary: words known; others are one symbol.
        word_list: file with one word a line, most frequent first; null counts the words of the training users
            (an .npz brings its own list).
        length: words of a sentence.
        sentences: most sentences a client trains on.
        fewest: users with fewer sentences are no clients, where the file says how many each has.
        test_users: part of the users whose sentences are the test set, where the data has no split of its own.
        test_sentences: most sentences to test on.
        validation: part of the users put aside for choosing settings.
        layers, heads, head_dim, stream, inner, dropout: of the Transformer.
        slice: what capacities cut: ``attn`` the head dimensions (the paper's text), ``attn+ffn``
            also the feed-forward parts, ``all`` the stream too (the published code).
    """

    name: str = "words"
    data: str = "stackexchange"
    vocabulary: int = 10_000
    word_list: str | None = None
    length: int = 20
    sentences: int = 128
    fewest: int = 20
    test_users: float = 0.1
    test_sentences: int = 10_000
    validation: float = 0.0
    layers: int = 3
    heads: int = 8
    head_dim: int = 12
    stream: int = 128
    inner: int = 2048
    dropout: float = 0.1
    slice: str = "attn+ffn"

    def __post_init__(self) -> None:
        one_of("task.slice", self.slice, SLICES)
        positive = (
            "vocabulary",
            "length",
            "sentences",
            "test_sentences",
            "layers",
            "heads",
            "head_dim",
            "stream",
            "inner",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise FedrolexError(f"task.{name} is {getattr(self, name)}: give 1 or more")
        if not 0 <= self.dropout < 1:
            raise FedrolexError(f"task.dropout is {self.dropout}: give at least 0, below 1")
        if not (self.test_users > 0 and self.validation >= 0 and self.test_users + self.validation < 1):
            raise FedrolexError("task.test_users and task.validation are parts of the users: together below 1")

    def make_model(self, scale: int = 1) -> nn.Module:
        """The server's model; what capacities cut is ``scale`` times as wide."""
        return self._made(self.vocabulary + 4, scale)

    def _made(self, symbols: int, scale: int) -> nn.Module:
        return WordTransformer(
            symbols,
            self.length,
            self.layers,
            self.heads,
            self.head_dim * scale,
            self.stream * (scale if self.slice == "all" else 1),
            self.inner * (1 if self.slice == "attn" else scale),
            self.dropout,
        )

    def frozen_axes(self) -> Sequence[str]:
        """Axes that capacities do not cut."""
        inner = [f"inner{layer}" for layer in range(self.layers)]
        return {"attn": ["stream", *inner], "attn+ffn": ["stream"], "all": []}[self.slice]

    def build(self, clients: int | None, seed: int, folder: Path) -> Task:
        """The task, with all users as clients or a random choice of them."""
        train, test = self._open(folder)
        order = choose_users(train, self.fewest, seed)
        if test is None:
            count = max(1, round(self.test_users * len(order)))
            test, testers, order = train, order[:count], order[count:]
        else:
            testers = choose_users(test, 1, seed)
        count = max(1, round(self.validation * len(order))) if self.validation else 0
        judges, order = order[:count], order[count:]
        if clients is not None and clients > len(order):
            raise FedrolexError(f"fleet.clients is {clients}; {self.data} has {len(order)} users to train: give fewer")
        chosen = np.sort(order[:clients])
        words = self._words(train, chosen, seed)

        def read(users: Users, who: NDArray[np.int64]) -> Examples:
            return read_sentences(users, who.tolist(), words, self.length, self.sentences, self.test_sentences)

        return NextWord(
            name=self.data,
            build=lambda scale: self._made(words.size, scale),
            users=train,
            chosen=chosen,
            vocabulary=words,
            test=read(test, testers),
            length=self.length,
            sentences=self.sentences,
            frozen=self.frozen_axes(),
            validation=read(train, judges) if count else None,
        )

    def _open(self, folder: Path) -> tuple[Users, Users | None]:
        """The training users, and the test users where the data has them apart."""
        if self.data in TEXTS:
            source = find_source(self.data)
            if lacking(source, folder) is not None:
                raise FedrolexError(
                    f"{self.data} is not in {folder}: put {source.about} into {folder / source.folder}, "
                    "or say where it is with --data or FEDROLEX_DATA"
                )
        match self.data:
            case "stackexchange":
                return open_users(folder / "stackexchange" / "users.jsonl"), None
            case "blogs":
                return open_users(folder / "blogs" / "blogs.npz"), None
            case "stackoverflow":
                whole = folder / "stackoverflow" / "stackoverflow.sqlite"
                if whole.is_file():
                    return open_users(whole, "train"), open_users(whole, "test")
                parts = [folder / "stackoverflow" / f"stackoverflow_{part}.h5" for part in ("train", "test")]
                return open_users(parts[0], "train"), open_users(parts[1], "test")
        path = Path(self.data).expanduser()
        train = open_users(path)
        if path.suffix in (".sqlite", ".db"):
            with suppress(FedrolexError):  # a file without that split
                return train, open_users(path, "test")
        return train, None

    def _words(self, users: Users, who: NDArray[np.int64], seed: int) -> Vocabulary:
        if self.word_list is not None:
            return Vocabulary.read(Path(self.word_list).expanduser(), self.vocabulary)
        return count_words(users, self.vocabulary, who, seed)
