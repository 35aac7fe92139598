"""Agents, the policies that speak for them, and the loading of their models."""
