"""Deliberate breakages of torch, planted from outside: how the suite itself is checked.

``autograd_conformance.faults.words`` has the table ``FAULTS`` and ``plant``; this package imports nothing by itself.
"""
