"""Tensors on their way between a server and a device: raw bytes, whose names, shapes and types both sides know.

Nothing that came over the network is unpickled or parsed: bytes have exactly the length that the plan gives them, or
are refused.
"""

from math import prod
from typing import Literal, get_args

import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedrolex.clients import Tensors
from fedrolex.core import FedrolexError, one_of

RAW = "fedrolex.raw"
SCALE = 4  # bytes of the scale before int8 values
MOST_DIMENSIONS = 16

Transport = Literal["fp32", "bf16", "int8"]
"""How floating-point values travel: as they are, as bfloat16, or as eight bits and one scale a tensor."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.uint8, torch.bool,
    )
}  # fmt: skip


def downward(transport: Transport) -> Transport:
    """How values travel to devices where answers come back by ``transport``: in no fewer than sixteen bits."""
    return "fp32" if transport == "fp32" else "bf16"


def packed(tensors: Tensors, transport: Transport = "fp32") -> ArrayRecord:
    """Tensors as they travel."""
    one_of("transport", transport, get_args(Transport))
    return ArrayRecord({name: _array(tensor.detach().cpu(), transport) for name, tensor in tensors.items()})


def unpacked(record: ArrayRecord, like: Tensors, transport: Transport = "fp32") -> dict[str, Tensor]:
    """The tensors of a record, which must have the names, shapes and types of ``like``; raises in one line."""
    odd = next(iter(sorted(set(record) ^ set(like))), None)
    if odd is not None:
        raise FedrolexError(f"tensor {odd[:80]!r} is {'unknown' if odd in record else 'missing'}")
    found = {}
    for name, wanted in like.items():
        shape, dtype = tuple(wanted.shape), _carried_as(wanted.dtype, transport)
        array = record[name]
        if tuple(array.shape) != shape:
            raise FedrolexError(f"{name} has shape {_short(array.shape)}; this window's part has {shape}")
        if array.dtype != _name(dtype):
            raise FedrolexError(f"{name} holds {array.dtype[:20]!r}, not {_name(dtype)}")
        found[name] = _values(name, array, shape, dtype, transport).to(wanted.dtype)
    return found


def unpacked_freely(record: ArrayRecord) -> dict[str, Tensor]:
    """Tensors whose shapes the sender says; their bytes must be as many as that."""
    found = {}
    for name, array in record.items():
        fits = len(array.shape) <= MOST_DIMENSIONS and all(0 <= size < 2**40 for size in array.shape)
        if array.dtype not in DTYPES or not fits:
            raise FedrolexError(f"{name[:80]} holds {array.dtype[:20]!r} {_short(array.shape)}: no such tensor is sent")
        found[name] = _values(name, array, tuple(array.shape), DTYPES[array.dtype], "fp32")
    return found


def size(record: ArrayRecord) -> int:
    """Bytes of the values in a record, before anything is read from them."""
    return sum(len(array.data) for array in record.values())


def forms(tensors: Tensors) -> dict[str, Tensor]:
    """Names, shapes and types of tensors, without their values."""
    return {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}


def rounded(tensors: Tensors, transport: Transport) -> dict[str, Tensor]:
    """Tensors as the other side will have them."""
    return unpacked(packed(tensors, transport), forms(tensors), transport)


def _carried_as(dtype: torch.dtype, transport: Transport) -> torch.dtype:
    """The type in which values of a type travel."""
    if transport == "fp32" or not dtype.is_floating_point:
        return dtype
    return torch.bfloat16 if transport == "bf16" else torch.int8


def _array(tensor: Tensor, transport: Transport) -> Array:
    dtype, before = _carried_as(tensor.dtype, transport), b""
    if transport == "int8" and tensor.is_floating_point():
        scale = float(tensor.abs().max()) / 127 if tensor.numel() else 0.0
        before = _bytes(torch.tensor([scale], dtype=torch.float32))
        tensor = (tensor / scale if scale else tensor * 0).round()
    return Array(_name(dtype), tuple(tensor.shape), RAW, before + _bytes(tensor.to(dtype)))


def _values(name: str, array: Array, shape: tuple[int, ...], dtype: torch.dtype, transport: Transport) -> Tensor:
    scaled = SCALE if transport == "int8" and dtype == torch.int8 else 0
    wanted = scaled + prod(shape) * dtype.itemsize
    if array.stype != RAW or len(array.data) != wanted:
        raise FedrolexError(
            f"{name[:80]} has {len(array.data)} bytes ({array.stype[:20]!r}); it takes {wanted} ({RAW})"
        )
    if not prod(shape):
        return torch.zeros(shape, dtype=dtype)
    values = torch.frombuffer(bytearray(array.data[scaled:]), dtype=dtype).reshape(shape)
    if not scaled:
        return values
    scale = torch.frombuffer(bytearray(array.data[:SCALE]), dtype=torch.float32)
    return values.float() * scale


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(shape: tuple[int, ...]) -> str:
    said = str(tuple(shape))
    return said if len(said) <= 60 else f"{said[:60]} …"
