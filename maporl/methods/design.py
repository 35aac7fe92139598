"""Design: one agent writes a plan of a team, and another one plays all roles of that team (MetaAgent-X)."""

from dataclasses import dataclass

from maporl.protocols.base import Play, Protocol, seats
from maporl.text import check_pattern, matches, text_option
from maporl.types import Ask, Example, Utterance, user_says
from trl_ext.ppo.options import Positive, option

EXAMPLE = (
    "Solver: Solve the problem step by step.\nChecker: Check every step of the solution, and give the final answer."
)
PLAN = (
    "{question}\n\nDo not answer this yourself. Write the plan of a team that answers it, with one line for each "
    "member, at most {steps}: its name, a colon, and what it shall do. They speak in this order, and each is told "
    "what was said before it. What the last one says is the answer. For example:\n{example}"
)
FIRST = "{question}\n\nYou are {name}. {instruction}"
LATER = "{question}\n\nOthers have said:\n\n{others}\n\nYou are {name}. {instruction}"


@dataclass(frozen=True)
class Design(Protocol):
    """The ``designer`` writes a plan, and the ``executor`` speaks for each member of the planned team, in order.

    A plan is text, and nothing of it is run as a program. Each member is asked outside any conversation, with its
    instruction and all that members before it have said. The last one answers the question.

    If no member is found, nobody speaks, and the plan earns 0 under the reward name ``plan``. A plan that is carried
    out earns nothing by itself: the rule ``tree_mean`` makes it worth what its executions are worth. The column
    ``caller`` says which plan an execution carries out.

    Raises:
        ValueError: an option is out of range, or a text or a pattern cannot serve.
    """

    steps: Positive = option(4, "Most members of a team. Later ones of a plan are left out.")
    designer: str | None = option(None, "The agent that plans. Default: the first one.")
    executor: str | None = option(None, "The agent that speaks for all members. Default: the second one.")
    plan: str = text_option(PLAN, "What the designer is asked, with {question!}, {steps} and {example}.")
    example: str = option(EXAMPLE, "A plan that the designer is shown, and that a warm start teaches.")
    first: str = text_option(FIRST, "What the first member is asked, with {question}, {name} and {instruction!}.")
    later: str = text_option(LATER, "What a later one is asked, with {question}, {name}, {instruction!} and {others!}.")
    quote: str = text_option("{name}: {text}", "The words of an earlier member in {{others}}, with {name} and {text!}.")
    member: str = option(
        r"(?m)^[^\w\n]*(?:\d+[.)][^\w\n]*)?([^\W\d_][^:：\n]{0,39}?)[*_ \t]*(?::[*_]*[ \t]+|：[*_ \t]*)(\S.*)$",
        "A regular expression whose two groups are the name and the instruction of a member.",
    )
    every_step_scored = False
    roles = True
    players = 2
    records = frozenset({"caller"})
    pays = frozenset({"plan"})

    def __post_init__(self):
        super().__post_init__()
        if self.designer is not None and self.designer == self.executor:
            raise ValueError(f"designer, executor: expected two agents, got {self.designer!r} twice; give each its own")
        if (groups := check_pattern("member", self.member)) != 2:
            raise ValueError(
                f"member: expected two groups, the name and the instruction, got {groups} in {self.member!r}"
            )
        if not self.members(self.example):
            raise ValueError(f"example: expected a plan in which member finds somebody, got {self.example!r:.80}")

    @property
    def turns(self) -> int:  # type: ignore[override]  # it follows from the options
        """The largest number of utterances of the executor."""
        return self.steps

    def mentioned(self) -> set[str]:
        """Return the agents that the options name."""
        return {name for name in (self.designer, self.executor) if name is not None}

    def members(self, plan: str) -> list[tuple[str, str]]:
        """Return the name and the instruction of each member of a planned team.

        >>> Design(steps=2).members("Here it is:\\n1. **Solver**: Solve it.\\n- Checker: Check it.\\nThird: Again.")
        [('Solver', 'Solve it.'), ('Checker', 'Check it.')]
        """
        members = [(match.group(1).strip(), match.group(2).strip()) for match in matches(self.member, plan)]
        return members[: self.steps]

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play the plan and its execution. The outcome is the number of members that spoke."""
        designer, executor = seats(agents, self.designer, self.executor)
        text = self.plan.format(question=example.question, steps=self.steps, example=self.example)
        (plan,) = yield [Ask(designer, user_says(text), "designer", answers=False, taught=(self.example,))]
        members = self.members(plan.text)
        if not members:
            plan.rewards["plan"] = 0.0
        said: list[tuple[str, Utterance]] = []
        for number, (name, instruction) in enumerate(members, 1):
            others = "\n\n".join(self.quote.format(name=other, text=u.words()) for other, u in said)
            template = self.later if said else self.first
            text = template.format(question=example.question, name=name, instruction=instruction, others=others)
            parents = (plan.id, *(u.id for _, u in said))
            last = number == len(members)
            (words,) = yield [
                Ask(executor, user_says(text), "executor", parents, caller=plan.id, answers=last, fresh=True)
            ]
            said.append((name, words))
        return len(said)
