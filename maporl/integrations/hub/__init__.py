"""Share a team's folder: push it without the user's private data, and pull a team as untrusted input. Knows no model.

A folder with a ``config.yaml`` and a folder for each policy is what is shared, whether a run or ``Team.save`` wrote it.
:func:`.push.push` packs the files of it that may become public (:mod:`.pack`), without secrets and paths of this
machine (:mod:`.scrub`). ``Team.from_pretrained`` downloads one (:mod:`.pull`), whose configuration may reach for
nothing of the user's (:mod:`.reach`). Imports no torch.
"""
