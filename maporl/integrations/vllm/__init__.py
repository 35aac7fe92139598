"""Rollouts with vLLM: the engine, its servers, and vLLM in the trainer's own process."""
