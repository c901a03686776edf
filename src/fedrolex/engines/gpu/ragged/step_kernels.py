# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What a step begins and ends with: the next batch, the loss, the optimiser; for all clients of a ragged cohort."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch", "room", "image"])
def fetch(
    x, y, sizes, counter, images, targets, counts, done, batch, room, image, SIZE: tl.constexpr, BATCH: tl.constexpr
):
    """The next batch: inputs, targets, how many each client has, and how many steps it has done with this one.

    ``image``: numbers an image. Inputs are stored image by image, so a batch is one stretch of memory.
    """
    client, block = tl.program_id(0), tl.program_id(1)
    begin = tl.load(counter) * batch
    at = block * SIZE + tl.arange(0, SIZE)
    real = at < batch * image
    tl.store(images + client * batch * image + at, tl.load(x + (client * room + begin) * image + at, real), real)
    if block == 0:
        row = tl.arange(0, BATCH)
        tl.store(targets + client * batch + row, tl.load(y + client * room + begin + row, row < batch), row < batch)
        count = tl.minimum(tl.maximum(tl.load(sizes + client) - begin, 0), batch).to(tl.int32)
        tl.store(counts + client, count)
        tl.store(done + client, tl.load(done + client) + (count > 0).to(tl.int32))


@triton.jit
def pool(
    active, out, table, tiles, counts,
    AREA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Mean over the pixels of every image.

    Table: where active values, weights, bias, means begin, channels. Tiles: client, block of images, of channels.
    """
    tile = tl.program_id(0)
    client = tl.load(tiles + 3 * tile)
    row = table + 8 * client
    active += tl.multiple_of(tl.load(row), ALIGN)
    channels = tl.multiple_of(tl.load(row + 4).to(tl.int32), ALIGN)
    image = tl.load(tiles + 3 * tile + 1) * ROWS + tl.arange(0, ROWS)
    channel = tl.load(tiles + 3 * tile + 2) * COLS + tl.arange(0, COLS)
    good = (image < tl.load(counts + client))[:, None] & (channel < channels)[None, :]
    mean = tl.zeros((ROWS, COLS), tl.float32)
    for pixel in tl.static_range(0, AREA):
        at = (image * AREA + pixel)[:, None] * channels + channel[None, :]
        mean += tl.load(active + at, good, other=0.0).to(tl.float32)
    at = image[:, None] * channels + channel[None, :]
    tl.store(out + tl.load(row + 3) + at, mean / AREA, good)


@triton.jit(do_not_specialize=["batch", "classes"])
def judge(
    weights, grads, means, targets, held, totals, table, counts, batch, classes,
    MASK: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr, COLS: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Linear layer and cross-entropy; then back: the gradient of the means takes their place. One program a client.

    Table: as for :func:`pool`. ``MASK``: 0 none, 1 scores of classes the client does not hold become 0, 2 they
    are left out.
    """
    client = tl.program_id(0)
    count = tl.load(counts + client)
    if count == 0:
        return
    row = table + 8 * client
    weight_at, bias_at = tl.load(row + 1), tl.load(row + 2)
    means += tl.load(row + 3)
    channels = tl.multiple_of(tl.load(row + 4).to(tl.int32), ALIGN)
    image = tl.arange(0, ROWS)
    label = tl.arange(0, CLASSES)
    scores = tl.zeros((ROWS, CLASSES), tl.float32)
    for begin in range(0, channels, COLS):
        channel = begin + tl.arange(0, COLS)
        good = (image < count)[:, None] & (channel < channels)[None, :]
        mean = tl.load(means + image[:, None] * channels + channel[None, :], good, other=0.0)
        weight = tl.load(
            weights + weight_at + label[None, :] * channels + channel[:, None],
            (label < classes)[None, :] & (channel < channels)[:, None],
            other=0.0,
        )
        scores = tl.dot(mean, weight, scores, input_precision=PRECISION)
    scores += tl.load(weights + bias_at + label, label < classes, other=0.0)[None, :]
    known = label < classes
    mine = tl.load(held + client * classes + label, known, other=0) != 0
    counted = known
    if MASK == 1:
        scores = tl.where(mine[None, :], scores, 0.0)
    if MASK == 2:
        counted = known & mine
    scores = tl.where(counted[None, :], scores, float("-inf"))
    target = tl.load(targets + client * batch + image, image < count, other=0)
    scores = scores - tl.max(scores, 1)[:, None]
    size = tl.sum(tl.exp(scores), 1)
    hit = label[None, :] == target[:, None].to(tl.int32)
    losses = tl.log(size) - tl.sum(tl.where(hit, scores, 0.0), 1)
    tl.store(totals + client, tl.load(totals + client) + tl.sum(tl.where(image < count, losses, 0.0), 0) / count)
    change = (tl.exp(scores) / size[:, None] - hit.to(tl.float32)) / count
    if MASK == 1:
        change = tl.where(mine[None, :], change, 0.0)
    change = tl.where((image < count)[:, None] & counted[None, :], change, 0.0)
    tl.store(grads + bias_at + label, tl.sum(change, 0), known)
    for begin in range(0, channels, COLS):
        channel = begin + tl.arange(0, COLS)
        good = (image < count)[:, None] & (channel < channels)[None, :]
        mean = tl.load(means + image[:, None] * channels + channel[None, :], good, other=0.0)
        at = weight_at + label[:, None] * channels + channel[None, :]
        real = known[:, None] & (channel < channels)[None, :]
        weight = tl.load(weights + at, real, other=0.0)
        tl.store(grads + at, tl.dot(tl.trans(change), mean, input_precision=PRECISION), real)
        tl.debug_barrier()
        back = tl.dot(change, weight, input_precision=PRECISION)
        tl.store(means + image[:, None] * channels + channel[None, :], back, good)


@triton.jit(do_not_specialize=["slots"])
def collect(parts, grads, squares, chunks, slots, SIZE: tl.constexpr):
    """Add up the parts of gradients, and the squares of gradients that nobody has added up yet.

    Chunks: where it begins in the gradients, its length, where its parts begin, how many, their distance, the client,
    its place among the client's ``slots`` of ``squares``.
    """
    row = chunks + 8 * tl.program_id(0)
    at = tl.arange(0, SIZE)
    real = at < tl.multiple_of(tl.load(row + 1).to(tl.int32), 16)
    grads += tl.multiple_of(tl.load(row), 16)
    count = tl.load(row + 3).to(tl.int32)
    if count > 0:
        parts += tl.multiple_of(tl.load(row + 2), 16)
        apart = tl.multiple_of(tl.load(row + 4), 16)
        value = tl.load(parts + at, real, other=0.0)
        for part in range(1, count):
            value += tl.load(parts + part * apart + at, real, other=0.0)
        tl.store(grads + at, value, real)
    else:
        value = tl.load(grads + at, real, other=0.0)
    tl.store(squares + tl.load(row + 5) * slots + tl.load(row + 6), tl.sum(value * value, 0))


@triton.jit(do_not_specialize=["slots", "clip"])
def limit(squares, factors, slots, clip, SIZE: tl.constexpr):
    """What every client's gradient is multiplied by so that its norm is at most ``clip``."""
    client = tl.program_id(0)
    total = tl.zeros((SIZE,), tl.float32)
    for begin in range(0, slots, SIZE):
        at = begin + tl.arange(0, SIZE)
        total += tl.load(squares + client * slots + at, at < slots, other=0.0)
    norm = tl.sqrt(tl.sum(total, 0))
    tl.store(factors + client, tl.minimum(clip / (norm + 1e-6), 1.0))


@triton.jit(do_not_specialize=["decay", "momentum"])
def descend(
    weights, grads, first, second, low, factors, steps, rate, chunks, counts, decay, momentum,
    CLIP: tl.constexpr, ADAM: tl.constexpr, MOMENTUM: tl.constexpr, LOW: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The optimiser's step; a client that has no images in this batch stays as it is.

    Chunks: where it begins, its length, and in the sixth place the client. ``steps``: done by each client, with
    this one. ``LOW``: parameters are also written in the precision that products are taken in.
    """
    row = chunks + 8 * tl.program_id(0)
    client = tl.load(row + 5)
    if tl.load(counts + client) == 0:
        return
    at = tl.multiple_of(tl.load(row), 16) + tl.arange(0, SIZE)
    real = tl.arange(0, SIZE) < tl.multiple_of(tl.load(row + 1).to(tl.int32), 16)
    value = tl.load(weights + at, real, other=0.0)
    change = tl.load(grads + at, real, other=0.0)
    if CLIP:
        change *= tl.load(factors + client)
    change += decay * value
    speed = tl.load(rate)
    if ADAM:
        done = tl.load(steps + client).to(tl.float64)
        mean = tl.load(first + at, real, other=0.0)
        mean += (change - mean) * 0.1
        square = tl.load(second + at, real, other=0.0) * 0.999 + change * change * 0.001
        tl.store(first + at, mean, real)
        tl.store(second + at, square, real)
        speed = speed / (1.0 - tl.exp(done * -0.10536051565782628)).to(tl.float32)  # ln 0.9
        size = tl.sqrt(square) / tl.sqrt(1.0 - tl.exp(done * -0.0010005003335835335)).to(tl.float32) + 1e-8  # ln 0.999
        change = mean / size
    elif MOMENTUM:
        change += momentum * tl.load(first + at, real, other=0.0)
        tl.store(first + at, change, real)
    value -= speed * change
    tl.store(weights + at, value, real)
    if LOW:
        tl.store(low + at, value.to(low.dtype.element_ty), real)
