"""Tasks that read one public data set each, tiny tasks of their kind, and the search in passages that they bring.

``TASKS`` names them as ``MODULE:OBJECT``, ``TOOLS`` and ``ENVIRONMENTS`` the search, and a module is imported when a
configuration names its part. What reads data sets of the user's own is in :mod:`maporl.tasks`.
"""
