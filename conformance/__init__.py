"""A property-based conformance test suite for PyTorch autograd."""

__version__ = "0.1.0"
