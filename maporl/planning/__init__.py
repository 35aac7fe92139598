"""What a cluster would do with a run: memory, seconds and the bottleneck of each way to place its policies.

``shapes`` has what a model needs, ``devices`` what a device gives, ``estimates`` the seconds of each phase, and ``placements``
the ways to share devices out. Nothing here runs a model. The constants are assumptions, which the output names.
"""
