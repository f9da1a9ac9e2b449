"""Authority on other people's kernels by name: the peers that are known, and routes from a declaration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.adapters import attention_gym, fla, flash_kda, sglang, vllm
from harness.adapters.declare import Adapter, Domain, Gate, States
from harness.adapters.routes import adapter_route
from harness.call import Route

__all__ = ["PEERS", "Adapter", "Domain", "Gate", "Peer", "States", "adapter_route"]


@dataclass(frozen=True)
class Peer:
    """A known implementation: the package it is imported from, the distribution that has its version, its routes."""

    package: str
    distribution: str
    routes: Callable[[], tuple[Route, ...]]


PEERS: Mapping[str, Peer] = {
    "fla": Peer("fla", "fla-core", fla.routes),
    "flash_kda": Peer("flash_kda", "flash_kda", flash_kda.routes),
    "attention_gym": Peer("attn_gym", "attn_gym", attention_gym.routes),
    "vllm": Peer("vllm", "vllm", vllm.routes),
    "sglang": Peer("sglang", "sglang", sglang.routes),
}
