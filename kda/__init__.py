"""KDA (Kimi Delta Attention) for PyTorch: Triton kernels, every gradient, and the registry that chooses among them."""

from kda import chunk_bwd as _chunk_bwd
from kda import fused as _fused
from kda import fused_segments as _fused_segments
from kda.backends import torch_backend as _torch_backend
from kda.chunk import chunk_kda
from kda.context_parallel import ContextParallel, build_cp_context
from kda.decode import kda_decode
from kda.explain import explain
from kda.fused_recurrent import fused_recurrent_kda
from kda.gate import fused_kda_gate
from kda.precision import PrecisionSpec
from kda.record import LaunchRecord, record_launches
from kda.registry import Explanation, Route, forbid_routes, force_route, routes

__all__ = [
    "ContextParallel",
    "Explanation",
    "LaunchRecord",
    "PrecisionSpec",
    "Route",
    "build_cp_context",
    "chunk_kda",
    "explain",
    "forbid_routes",
    "force_route",
    "fused_kda_gate",
    "fused_recurrent_kda",
    "kda_decode",
    "record_launches",
    "routes",
]

del _chunk_bwd, _fused, _fused_segments, _torch_backend
