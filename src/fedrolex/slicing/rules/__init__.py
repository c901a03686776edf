"""Which dimensions an operation ties together: one rule an operator, found by name in :data:`RULES`.

An operator without a rule is safe: its operands are frozen (see :func:`fedrolex.slicing.walk.walk`).
"""

from fedrolex.slicing.rules import contractions, elementwise, selections, shapes
from fedrolex.slicing.rules.call import RULES, Call, Traced

__all__ = ["RULES", "Call", "Traced", "contractions", "elementwise", "selections", "shapes"]
