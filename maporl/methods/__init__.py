"""What one paper alone uses, a module for each paper. Nothing of maporl imports them; its tables name their parts.

A part stands in the table of its kind (``RULES``, ``TRANSFORMS``, ``SOURCES``, ``BUILDERS``) as ``MODULE:OBJECT``, and
its module is imported when a configuration names it. What a second method uses belongs into the package of its kind.
"""
