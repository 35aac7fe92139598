"""What other libraries bring, and what nobody needs who does not use them: Ray, vLLM, the hub, environments and games.

Each is a module or a package of its own here. Nothing of the core imports one: its tables name them by texts.
"""
