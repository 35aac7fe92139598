"""Rollouts with vLLM: the engine, its servers, and vLLM in the trainer's own process."""

from maporl.engines.vllm.engine import VLLMEngine as VLLMEngine
from maporl.engines.vllm.server import VLLMFailure as VLLMFailure
