"""Tasks that read one public data set each, and tiny tasks of their kind, which need no download.

``TASKS`` names them as ``MODULE:OBJECT``, and a module is imported when a configuration names its task. What reads data
sets of the user's own is in :mod:`maporl.tasks`.
"""
