"""A cohort of different widths in one kernel launch a layer: PreResNets on an NVIDIA GPU."""

from fedrolex.engines.gpu.ragged.engine import Ragged

__all__ = ["Ragged"]
