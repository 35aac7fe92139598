"""Runs programs of data and of models, which nobody has read: each in a process that the kernel holds."""
