"""What can be built: Hypothesis strategies for shapes, leaves, graphs and whole programs."""

from autograd_conformance.strategies.drawing import graphs, leaves, programs, shape_pairs, shapes

__all__ = ["graphs", "leaves", "programs", "shape_pairs", "shapes"]
