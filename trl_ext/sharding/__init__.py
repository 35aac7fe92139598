"""How processes hold weights, gradients and optimizer state: replicated, ZeRO or FSDP2."""
