"""The op table: what programs are made of."""

from autograd_conformance.ops.added import ADDED
from autograd_conformance.ops.binary import ARITHMETIC, CONTRACTIONS
from autograd_conformance.ops.entry import FLOATS, LIMIT, Op
from autograd_conformance.ops.reductions import REDUCTIONS
from autograd_conformance.ops.several import CASTS, CONSTANTS, JOINS, MOST_OUTPUTS, SEVERAL
from autograd_conformance.ops.unary import KINKED, SMOOTH
from autograd_conformance.ops.views import INDEXING, MOST_DIMS, VIEWS

TABLE: tuple[Op, ...] = (
    *ARITHMETIC, *SMOOTH, *VIEWS, *REDUCTIONS, *CONTRACTIONS, *JOINS, *SEVERAL, *INDEXING, *KINKED, *CONSTANTS, *CASTS,
)  # fmt: skip
OPS: dict[str, Op] = {op.name: op for op in TABLE}
"""The table by name, and what users have added to it."""

__all__ = ["ADDED", "FLOATS", "LIMIT", "MOST_DIMS", "MOST_OUTPUTS", "OPS", "TABLE", "Op"]
