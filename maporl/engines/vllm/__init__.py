"""Rollouts with vLLM: the engine, its servers, and vLLM in the trainer's own process."""

from maporl.engines.vllm.engine import VLLMEngine
from maporl.engines.vllm.server import VLLMFailure

__all__ = ["VLLMEngine", "VLLMFailure"]
