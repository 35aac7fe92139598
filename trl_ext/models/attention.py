"""Attention implementations by transformers' names. Importing this module imports neither torch nor transformers."""

from importlib.util import find_spec

ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flex_attention")
"""What ``attn_implementation`` may be. Other names are read from models that have them, but cannot be chosen."""


def check_name(name: str) -> str:
    """Return the ``name`` of an attention implementation that can be chosen.

    Raises:
        ValueError: it cannot.
    """
    if name not in ATTENTIONS:
        raise ValueError(fault(name) or f"expected {', '.join(ATTENTIONS[:-1])} or {ATTENTIONS[-1]}, got {name!r:.80}")
    return name


def fault(name: str) -> str | None:
    """Return why an attention implementation cannot be used here, and what to do, or None if it can.

    Where a flash attention is not installed, and the package ``kernels`` is, transformers would load compiled code from
    a repository of the hub in its place.
    """
    if "/" in name or name.startswith("kernels:"):
        return (
            f"{name!r:.80} is code from another repository, and such code is never run here; choose sdpa, or "
            "flash_attention_2 with the package flash-attn"
        )
    if "flash" not in name:
        return None
    if name != "flash_attention_2":
        return f"expected flash_attention_2, which is the only flash attention that is used here, got {name!r:.80}"
    if find_spec("flash_attn") is None:
        return (
            "flash_attention_2 needs the package flash-attn; install it with: pip install flash-attn "
            "--no-build-isolation, or choose sdpa, which needs no package"
        )
    from transformers.utils import is_flash_attn_2_available

    if not is_flash_attn_2_available():
        return (
            "flash_attention_2 needs a CUDA device and flash-attn 2.3.3 or newer, and this process has not both; "
            "choose sdpa"
        )
    return None
