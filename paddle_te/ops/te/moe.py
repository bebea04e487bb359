"""A mixture of experts on Transformer Engine's kernels: not there yet."""

from paddle_te.native import BackendUnavailable

__all__ = ["check_experts"]


def check_experts():
    """Refuse: layers ask this before they make parameters."""
    raise BackendUnavailable([("backend transformer_engine has no mixtures of experts yet", "use backend paddle")])
