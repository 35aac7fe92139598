"""Code of single papers, protocols of one kind of recipe, games, and the tiny versions of recipes.

Nothing of maporl imports them; its tables name them. A part stands in the table of its kind (``PROTOCOLS``, ``RULES``,
``TRANSFORMS``, ``SOURCES``, ``BUILDERS``, ``TASKS``, ``GAMES``, ``BRANCHINGS``) as ``MODULE:OBJECT``, and its module is
imported when a configuration names it. What a second method uses belongs into the package of its kind.
"""
