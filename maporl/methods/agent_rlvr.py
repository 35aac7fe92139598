"""Agent-RLVR: a right second try, which somebody helped with, is preferred to a wrong first one (arXiv 2506.11425).

No torch.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from maporl.loops.builder import Builder, said
from maporl.loops.pairs import differ, same_prompt
from maporl.loops.rows import Pair, Row
from maporl.rounding import exceeds
from maporl.sections import Finite, section
from maporl.types import Dialogue
from trl_ext.ppo.options import option


@section()
class Repair(Builder):
    """Pairs of a right answer to a question and a wrong first answer to it (Agent-RLVR, arXiv 2506.11425).

    An answer is right if its value is greater than ``above``. It may be an agent's first answer, or one that somebody
    helped with. Either is chosen as an answer to the first prompt, in which nobody helps, so that the policy learns to
    answer alone. Each wrong first answer makes one pair, with the right answers of its agent in turn.
    """

    above: Finite = option(0.5, "What the value of a right answer is greater than.")
    makes = "pairs"

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Pair]:
        """Return the pairs.

        Raises:
            RunError: an agent was shown something else before its first answers to a question.
        """
        rights: dict[tuple[int, str], list[Row]] = defaultdict(list)
        wrongs: dict[tuple[int, str], list[Row]] = defaultdict(list)
        for row, _ in said(dialogues, roles):
            if exceeds(row.value, self.above):
                rights[row.place[0], row.agent].append(row)
        for row, _ in said(dialogues, roles, turn=0):
            if not exceeds(row.value, self.above):
                wrongs[row.place[0], row.agent].append(row)
        pairs = []
        for who, rejected in wrongs.items():
            for wrong, right in zip(rejected, itertools.cycle(rights[who]), strict=False):
                same_prompt(wrong, rejected[0])
                pairs.append(Pair(replace(right, prompt_ids=wrong.prompt_ids), wrong))
        return [pair for pair in pairs if differ(pair.chosen, pair.rejected)]
