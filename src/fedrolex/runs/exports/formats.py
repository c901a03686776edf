"""A model in formats that run without this package: ``torch.export`` (.pt2) and ONNX."""

from __future__ import annotations

import io
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from fedrolex.core import FedrolexError, in_one_line, one_of

FORMATS = ("pt2", "onnx")
MISSING = "ONNX needs the packages onnx and onnxscript: pip install 'fedrolex[onnx]'"
INPUT, OUTPUT, BATCH = "input", "output", "batch"


def can_write(format: str) -> bool:
    """Whether what a format needs is installed."""
    return format != "onnx" or all(find_spec(name) is not None for name in ("onnx", "onnxscript"))


def check_formats(formats: Sequence[str]) -> None:
    """Raise, in one line, unless all formats are known and can be written."""
    for format in formats:
        one_of("format", format, FORMATS)
        if not can_write(format):
            raise FedrolexError(MISSING)


def written_in(format: str, model: nn.Module, example: Tensor, about: Mapping[str, str] | None = None) -> bytes:
    """A file's content: the model for batches of any size, in evaluation mode.

    Args:
        format: one of :data:`FORMATS`.
        model: in evaluation mode, on the CPU; takes one tensor, gives one.
        example: an input of at least two rows.
        about: what an ONNX file says of the model, by name.
    """
    with in_one_line(f"the model cannot be written as {format}"), torch.no_grad(), _quiet():
        shapes = {INPUT: {0: torch.export.Dim(BATCH)}}
        program = torch.export.export(_OneInput(model), (example,), dynamic_shapes=shapes)
        if format == "pt2":
            file = io.BytesIO()
            torch.export.save(program, file)
            return file.getvalue()
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "model.onnx"
            torch.onnx.export(
                program,
                f=str(path),
                dynamo=True,
                external_data=False,
                input_names=[INPUT],
                output_names=[OUTPUT],
                verbose=False,
            )
            return _named(path, about or {})


def _named(path: Path, about: Mapping[str, str]) -> bytes:
    """An ONNX file with a name for its first dimension, which PyTorch numbers, and with what is said of the model."""
    import onnx

    made = onnx.load(path)
    own = made.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*made.graph.input, *made.graph.output, *made.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == own:
                dim.dim_param = BATCH
    onnx.helper.set_model_props(made, dict(about))
    content: bytes = made.SerializeToString()
    return content


class _OneInput(nn.Module):
    """A model whose input has a name: sub-models from a traced graph take any arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval()
        self.eval()

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.model(input)
        return output


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' remarks on themselves, which go to standard output as well."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
