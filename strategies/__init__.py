"""What can be built: Hypothesis strategies for shapes, leaves, graphs, whole programs and scenes."""

from autograd_conformance.strategies.drawing import graphs, leaves, programs, scenes, shape_pairs, shapes

__all__ = ["graphs", "leaves", "programs", "scenes", "shape_pairs", "shapes"]
