"""The loop of PPO, and PPOv2Trainer, which is the loop for one policy."""
