"""Chain-of-Agents: one policy learns whole dialogues as texts, and so to play all roles (arXiv 2508.13167).

No torch.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from maporl.config.schema import Config
from maporl.errors import Fault
from maporl.loops.builder import Builder, in_order
from maporl.loops.rows import Row
from maporl.loops.section import RowsStage
from maporl.rounding import exceeds
from maporl.sections import Finite, Positive, section
from maporl.text import text_option
from maporl.types import Dialogue
from trl_ext.ppo.options import option


@section()
class Flatten(Builder):
    """Whole dialogues as one text of one policy, which learns to play all roles (Chain-of-Agents, arXiv 2508.13167).

    What calls returned bears no loss. With ``roles`` only what was said in them bears loss. The text answers the
    question as the task puts it, after the system prompt of the agent that speaks with the policy.
    """

    into: str = option(help="The policy.")
    form: str = text_option("<{name}>{text}</{name}>", "What was said, by {name} and {text}, in the order of speaking.")
    observation: str = text_option(
        "<observation>{text}</observation>",
        "What calls returned, with {name} and {text}. It stands after the words that called.",
    )
    above: Finite = option(0.5, "What the last answer of a dialogue must be worth more than.")
    least: Positive = option(2, "The smallest number of utterances of a dialogue.")
    per_question: Positive | None = option(None, "Most dialogues of a question, the first ones. None: all.")

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Row]:
        taken: dict[int, int] = defaultdict(int)
        rows = []
        for dialogue in in_order(dialogues):
            answers = [u.rewards["credit"] for u in dialogue.answers() if "credit" in u.rewards]
            if not answers or not exceeds(answers[-1], self.above) or len(dialogue.utterances) < self.least:
                continue
            taken[dialogue.prompt] += 1
            if self.per_question is not None and taken[dialogue.prompt] > self.per_question:
                continue
            place = (dialogue.prompt, dialogue.rollout, 0)
            pieces, example = tuple(self.pieces(dialogue, roles)), dialogue.example
            rows.append(
                Row(
                    self.into,
                    self.into,
                    self.into,
                    example.id,
                    [],
                    [],
                    answers[-1],
                    place,
                    pieces=pieces,
                    example=example,
                )
            )
        return rows

    def check(self, config: Config, section: RowsStage, before: Sequence[str], where: str) -> Iterator[Fault]:
        """Yield that the policy ``into`` does not learn."""
        policies = {agent.policy or name for name, agent in config.agents.items() if agent.trainable and agent.weights}
        if self.into not in policies:
            yield Fault(
                f"{where}.build",
                f"flatten.into: {self.into!r} names none of the policies that learn",
                f"name one of {sorted(policies)}",
            )

    def pieces(self, dialogue: Dialogue, roles: Collection[str] = ()) -> Iterator[tuple[str, bool]]:
        """Yield the texts of a dialogue, each with whether it bears loss."""
        for u in dialogue.utterances:
            role = u.role or u.agent
            yield self.form.format(name=role, text=u.text), not roles or role in roles
            for call in u.calls:
                if call.result is not None:
                    yield self.observation.format(name=call.name, text=call.result.text), False
