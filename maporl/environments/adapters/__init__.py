"""Environments and tools that were written for other libraries: TRL, MCP servers, OpenEnv."""
