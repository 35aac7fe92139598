"""What an update's dialogues show of proposers: how many of their questions are asked, and are new.

Imports no torch.
"""

from collections.abc import Sequence

from maporl.types import Dialogue
from trl_ext.process import distributed


def proposal_metrics(dialogues: Sequence[Dialogue]) -> dict[str, float]:
    """Return the shares of proposals that were asked and that repeat another, over all processes, or nothing without
    any.

    A proposer that finds one question that pays may write nothing else, which these numbers show. All processes call
    this together.
    """
    proposals = [
        (u.tags["question"], u.tags["accepted"])
        for dialogue in dialogues
        for u in dialogue.utterances
        if u.tags.keys() >= {"question", "accepted"}
    ]
    made = distributed.all_gather_lists(proposals)
    if not made:
        return {}
    read = [question for question, _ in made if question is not None]
    repeated = (len(read) - len(set(read))) / len(read) if read else 0.0
    return {"proposals/asked": sum(asked for _, asked in made) / len(made), "proposals/repeated": repeated}
