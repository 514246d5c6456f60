"""CUDA-graph replay of a denoiser: captured per key of arguments, compared with plain calls, never stale.

docs/graphs.md says what is captured when, what keeps a call plain, and why a replay cannot be out of date.
"""

from __future__ import annotations

from samebits.graphs.denoiser import MAX_GRAPHS, DenoiserGraphs, GateView
from samebits.graphs.row import GraphRow

__all__ = ["MAX_GRAPHS", "DenoiserGraphs", "GateView", "GraphRow"]
