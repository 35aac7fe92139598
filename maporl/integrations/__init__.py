"""Adapters of other libraries, of use only to their users: Ray, vLLM, the hub, environments and games.

Each is a module or a package of its own here. Nothing of the core imports one: its tables name them by texts.
"""
