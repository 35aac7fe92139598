"""Orchestrate: an orchestrator names who speaks next, with a memory of what was done (AgentFlow, Puppeteer)."""

import math
from dataclasses import dataclass
from typing import Any

from maporl.protocols.base import Play, Protocol, check_template
from maporl.text import check_pattern, matches, text_option
from maporl.types import Ask, Example, Utterance, user_says
from trl_ext.ppo.options import Positive, option

STATE = "{question}\n\n{memory}\n\n"
PLAN = STATE + "Who shall act next, and to do what? They are: {agents}. End with <next>name: what to do</next>."
WORK = STATE + "{task}"
CHECK = STATE + "Is this enough to answer? End with <verify>stop</verify> or <verify>continue</verify>."
ANSWER = STATE + "Answer the question."


@dataclass(frozen=True)
class Orchestrate(Protocol):
    """The ``orchestrator`` names the agent that acts next and says what it shall do, at most ``steps`` times.

    It may name the agents without a role. They may have tools. All are asked outside any conversation, with everything
    that was done in ``{memory}``.

    The dialogue ends after ``steps`` steps, or if the orchestrator names ``end`` after an agent has acted, or if a
    verifier says so. Then the ``generator`` answers. Without a generator the replies of the agents are answers; if
    nobody has acted, the first agent acts.

    The orchestrator earns ``step_cost`` with each naming: log2(1 + t / (steps + 1)) in step t, from 1 (Puppeteer, arXiv
    2505.19591, as its code has it). Give it a negative weight. What the orchestrator says is a parent of what it leads
    to, so it has the credit of that, if ``reward.sources`` does not name ``step_cost``.

    Raises:
        ValueError: an option is out of range, two roles have one agent, ``end`` cannot be read, or a text or a pattern
            cannot serve.
    """

    steps: Positive = option(3, "Most steps.")
    orchestrator: str | None = option(None, "The agent that names who acts next. Default: the first one.")
    verifier: str | None = option(None, "An agent that says after each step whether the dialogue ends.")
    generator: str | None = option(None, "An agent that answers at the end.")
    plan: str = text_option(
        PLAN, "What the orchestrator is asked, with {question!}, {memory!} and {agents}, the names that it may give."
    )
    work: str = option(
        WORK,
        "What the named agent is asked, with {question}, {memory} and {task}, which is what the orchestrator wants of "
        "it.",
    )
    check: str = text_option(CHECK, "What the verifier is asked, with {question!} and {memory!}.")
    answer: str = text_option(ANSWER, "What the generator is asked, with {question!} and {memory!}.")
    done: str = text_option(
        "Step {step}, {agent}: {task}\n{text}", "A step in {{memory}}, with {step}, {agent}, {task} and {text!}."
    )
    nothing: str = option("Nothing was done yet.", "Stands in {memory} before the first step.")
    unknown: str = option(
        "Nobody of this name is here.",
        "Stands in {memory} in place of a reply, if no agent has the name. Then nobody acts in this step.",
    )
    end: str | None = option("end", "The name by which the orchestrator ends the dialogue. None: it cannot.")
    per_tokens: Positive | None = option(
        None,
        "Multiply a step's cost by the tokens of its reply and divide it by this number, so that what asks nobody "
        "costs nothing.",
    )
    pattern: str = option(
        r"(?s)<next>\s*([^\s:<]+)\s*:?((?:(?!<next>).)*?)</next>",
        "A regular expression that finds the name and, in its second group, the task. Its last match counts.",
    )
    stop: str = option(
        r"(?i)<verify>\s*stop\s*</verify>",
        "A regular expression that is found in what the verifier says if the dialogue ends.",
    )
    every_step_scored = False
    roles = True
    least_players = 2
    records = frozenset({"caller"})
    pays = frozenset({"step_cost"})

    def __post_init__(self):
        super().__post_init__()
        named = [name for name in (self.orchestrator, self.verifier, self.generator) if name is not None]
        if len(set(named)) < len(named):
            raise ValueError(f"orchestrator, verifier, generator: expected different agents, got {named}")
        check_pattern("stop", self.stop)
        groups = check_pattern("pattern", self.pattern)
        if groups not in (1, 2):
            raise ValueError(
                f"pattern: expected a group around the name, and one around the task; got {self.pattern!r}"
            )
        if self.end is not None and not self.end.strip():
            raise ValueError(
                f"end: expected a word that the orchestrator can say, such as end, or null, got {self.end!r}, which is "
                "also what is read where nobody is named"
            )
        read = self._named(f"<next>{self.end}</next>")[0]
        if self.end is not None and self.pattern == Orchestrate.pattern and read != self.end:
            raise ValueError(
                f"end: of {self.end!r} the pattern reads {read!r} as the name, so that it would never end a dialogue; "
                "give a word without spaces, colons and <, or another pattern"
            )
        check_template("work", self.work, {"question", "memory", "task"}, {"task"} if groups == 2 else {"question"})

    @property
    def turns(self) -> int:  # type: ignore[override]  # it follows from the options
        """The largest number of answers of an agent."""
        return self.steps if self.generator is None else 1

    def mentioned(self) -> set[str]:
        """Return the agents that the options name."""
        return {name for name in (self.orchestrator, self.verifier, self.generator) if name is not None}

    def check_players(self, players: tuple[str, ...]) -> None:
        """Check that somebody can be named, and that nobody is called like ``end``.

        Raises:
            ValueError: all agents have other roles, or an agent is called like ``end``.
        """
        super().check_players(players)
        if not self._workers(players):
            raise ValueError(
                f"orchestrate needs an agent that can be named, got {list(players)}; add one under agents:"
            )
        if self.end in self._workers(players):
            raise ValueError(f"end: {self.end!r} is an agent too; give end another word")

    def _workers(self, agents: tuple[str, ...]) -> list[str]:
        lead = self._lead(agents)
        return [agent for agent in agents if agent not in (lead, self.verifier, self.generator)]

    def _lead(self, agents: tuple[str, ...]) -> str:
        return self.orchestrator or next(a for a in agents if a not in (self.verifier, self.generator))

    def _named(self, text: str) -> tuple[str, str]:
        """Return the name and the task in what an orchestrator said, which are empty if it names nobody."""
        choices = list(matches(self.pattern, text))
        name, task = (part.strip() for part in ((*choices[-1].groups(""), "")[:2] if choices else ("", "")))
        return name, task

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play the dialogue. The outcome is the number of steps in which an agent was asked for."""
        lead, workers = self._lead(agents), self._workers(agents)
        memory: list[str] = []
        shown: tuple[int, ...] = ()  # whose words are in the memory
        heard: Utterance | None = None  # a verdict, or the word that ends: it leads to what follows, and is not shown
        answer: Utterance | None = None

        def ask(agent: str, role: str, template: str, task: str = "", **options: Any) -> list[Ask]:
            values = {"question": example.question, "memory": "\n\n".join(memory) or self.nothing}
            text = template.format(**values, task=task, agents=", ".join(workers))
            parents = shown if heard is None else (*shown, heard.id)
            return [Ask(agent, user_says(text), role, parents, fresh=True, **options)]

        def work(agent: str, task: str, caller: int) -> list[Ask]:
            return ask(agent, "worker", self.work, task, caller=caller, answers=self.generator is None)

        asked = f": {example.question}" if check_pattern("pattern", self.pattern) == 2 else ""
        taught = tuple(f"<next>{worker}{asked}</next>" for worker in workers)
        taught += () if self.end is None else (f"<next>{self.end}</next>",)
        while len(memory) < self.steps:
            (plan,) = yield ask(lead, "orchestrator", self.plan, answers=False, taught=taught)
            cost = math.log2(1 + (len(memory) + 1) / (self.steps + 1))
            plan.rewards["step_cost"] = cost if self.per_tokens is None else 0.0
            name, task = self._named(plan.text)
            if name == self.end and answer is not None:
                heard = plan
                break
            heard, said, shown = None, plan, (*shown, plan.id)
            if name in workers:
                (said,) = yield work(name, task, plan.id)
                answer, shown = said, (*shown, said.id)
                if self.per_tokens is not None:
                    plan.rewards["step_cost"] = cost * len(said.response_ids) / self.per_tokens
            text = self.unknown if said is plan else said.words()
            memory.append(self.done.format(step=len(memory) + 1, agent=name, task=task, text=text))
            if self.verifier is not None:
                (heard,) = yield ask(self.verifier, "verifier", self.check, answers=False, taught=VERDICTS)
                if any(matches(self.stop, heard.text)):
                    break
        if self.generator is not None:
            yield ask(self.generator, "generator", self.answer)
        elif answer is None:
            yield work(workers[0], "", shown[-1])
        else:
            (heard or plan).settles = (answer.id,)
        return len(memory)


VERDICTS = ("<verify>stop</verify>", "<verify>continue</verify>")
"""What warm starts teach a verifier to say."""
