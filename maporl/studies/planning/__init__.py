"""What a cluster would do with a run: memory, seconds and the bottleneck of each way to place its policies.

``groups`` has what the policies of a configuration do in an update, ``devices`` what a device gives, ``estimates`` the
seconds of each phase, and ``placements`` the ways to share devices out. ``probe`` measures what ``estimates`` would
otherwise assume, and ``report`` writes the plan and the section of the configuration. Nothing but ``probe`` runs a
model.
"""
