"""The claims that ``benchmarks/claims.py`` tests. Each expectation was written down before the claim's first run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from learning import Run, of_agent, team


@dataclass(frozen=True)
class Comparison:
    """The ``measure`` of ``arm`` minus that of ``against``, and the sign that the paper claims for it."""

    measure: str
    arm: str
    against: str
    direction: Literal[1, -1]


@dataclass(frozen=True)
class Lesson:
    """A run that an arm builds on. It starts from the warm-started weights of its world, or it is only the warm start."""

    world: str
    sets: list[str] | None


@dataclass(frozen=True)
class Claim:
    """What a paper claims, and how it is tested: a world's configuration, and the arms as overrides of it.

    ``<NAME>`` in an override is the folder of the run of that lesson with the same seed.
    """

    title: str
    paper: str
    expectation: str
    world: str
    arms: dict[str, list[str]]
    measures: dict[str, Callable[[Run], float]]
    comparisons: tuple[Comparison, ...]
    lessons: dict[str, Lesson] = field(default_factory=dict)


def flips(kind: str) -> Callable[[Run], float]:
    """The percent of held-out answers that change so from the first turn to the second, after training."""

    def measure(done: Run) -> float:
        counts = done.evaluation("after")["flips"][0]
        return 100 * counts[kind] / sum(counts[k] for k in KINDS)

    return measure


KINDS = ("wrong_to_right", "right_to_wrong", "stayed_right", "stayed_wrong")
LISTENERS = "configs/ppo/claims/listeners.yaml"


def frozen(agent: str) -> list[str]:
    """The override with which ``agent`` never learns."""
    return [f"schedule.freeze=[{{agent: {agent}, first: 1, last: 1000000}}]"]


def alphas(value: float) -> list[str]:
    """The override that sets the four weights of the collaboration bonus."""
    return [f"reward.bonus={{alpha: [{value}, {value}, {value}, {value}]}}"]


STILL = ["updates=1", "training.learning_rate=0", "training.value_learning_rate=0"]
"""The overrides with which a run trains nothing."""
SECOND_PAIR = [
    "updates=20",
    *frozen("bob"),
    "agents.bob.model=<strangers>/initial/bob",
    "warm_start.agents.bob.skill=previous",
    "task.skills=[next, previous]",
]


UNPAID = ["reward.sources={label: 0.0}", "updates=40"]
"""The overrides with which a right answer pays nothing."""


def largest(*names: str) -> Callable[[Run], float]:
    """The largest value that any of these metrics has in a run."""
    return lambda done: max(max(done.updates(name)) for name in names)


FINAL = "final turn, %"
CLAIMS = {
    "co_training": Claim(
        title="Training both agents gains more than training one",
        paper="MAPoRL (arXiv 2502.18439)",
        expectation="Two specialists are each right on half of the questions, and can gain only by listening. If both learn, the "
        "team's final turn is right on more of the held-out questions than if ann alone or bob alone learns. The first turn "
        "stays at 50% in all arms.",
        world=LISTENERS,
        arms={"both": [], "ann only": frozen("bob"), "bob only": frozen("ann")},
        measures={FINAL: team(-1), "first turn, %": team(0), "ann, %": of_agent("ann"), "bob, %": of_agent("bob")},
        comparisons=(Comparison(FINAL, "both", "ann only", 1), Comparison(FINAL, "both", "bob only", 1)),
    ),
    "incentives": Claim(
        title="The bonus for collaboration makes answers change for the better",
        paper="MAPoRL (arXiv 2502.18439)",
        expectation="With the weights of the bonus raised from 0 to 3, more wrong answers become right in the second turn, and "
        "fewer right answers become wrong.",
        world=LISTENERS,
        arms={"alpha 0": [], "alpha 3": alphas(3)},
        measures={"wrong to right, %": flips("wrong_to_right"), "right to wrong, %": flips("right_to_wrong"), FINAL: team(-1)},
        comparisons=(
            Comparison("wrong to right, %", "alpha 3", "alpha 0", 1),
            Comparison("right to wrong, %", "alpha 3", "alpha 0", -1),
        ),
    ),
    "incentives_alone": Claim(
        title="The bonus for collaboration makes answers change for the better, where nothing else does",
        paper="MAPoRL (arXiv 2502.18439)",
        expectation="For two agents that are paid for their labels, the bonus makes the gain of a right second answer 1 + alpha "
        "instead of 1, whatever the first was: it changes the size of rewards and not their order, which whitening removes "
        "(the claim above). Here a right answer pays nothing, so the bonus alone can tell a good change from a bad one. With "
        "alpha 3 more wrong answers become right, and fewer right answers become wrong, than with alpha 0.",
        world=LISTENERS,
        arms={"alpha 0": UNPAID, "alpha 3": [*UNPAID, *alphas(3)]},
        measures={"wrong to right, %": flips("wrong_to_right"), "right to wrong, %": flips("right_to_wrong"), FINAL: team(-1)},
        comparisons=(
            Comparison("wrong to right, %", "alpha 3", "alpha 0", 1),
            Comparison("right to wrong, %", "alpha 3", "alpha 0", -1),
        ),
    ),
    "transfer": Claim(
        title="Listening that was learned with one partner is of use with another",
        paper="MAPoRL (arXiv 2502.18439), transfer to other data sets",
        expectation="Ann knows one skill. She learns to listen to a partner with a second skill, on questions of these two "
        "skills. Then she is asked for her own and for a third skill, beside a partner who knows the third and does not learn, "
        "and learns for 20 updates. Her final answer is right more often than if she had not learned to listen before.",
        world="configs/ppo/claims/first_pair.yaml",
        arms={"taught to listen": ["agents.ann.model=<pair>/final/ann", *SECOND_PAIR], "as at first": SECOND_PAIR},
        measures={"ann's final answer, %": of_agent("ann"), "ann's first answer, %": of_agent("ann", turn=0)},
        comparisons=(Comparison("ann's final answer, %", "taught to listen", "as at first", 1),),
        lessons={
            "pair": Lesson("configs/ppo/claims/first_pair.yaml", ["task.skills=[next, reversed]"]),
            "strangers": Lesson("configs/ppo/claims/second_pair.yaml", None),
        },
    ),
    "influence": Claim(
        title="Words that only a partner can use are learned from the partner's later reward",
        paper="MAPoRL (arXiv 2502.18439), influence-aware reward",
        expectation="Each of two players must guess a number that only the other sees. Both can read a code, and at first say random "
        "letters, which pay nobody. With credit shared over the later turn both learn to say what they see, and their guesses "
        "are right far more often than by chance, which is 33%. With the reward of their own turn alone they stay there.",
        world="configs/ppo/claims/exchange.yaml",
        arms={
            "shared later reward": [],
            "own turn": ["reward.share=individual", "reward.horizon=current"],
        },
        measures={"guesses, %": team(-1), "legal moves, %": lambda done: 100 * done.updates("reward/legal")[-1]},
        comparisons=(Comparison("guesses, %", "shared later reward", "own turn", 1),),
    ),
    "dr_mas": Claim(
        title="Statistics of each agent's own rewards lower the peaks of the gradient",
        paper="Dr. MAS (github.com/langfengQ/DrMAS)",
        expectation="Four agents answer sums. Three of them share one policy and are right about nine times in ten. The fourth "
        "gives one answer in four and is right about one time in four, so its rewards lie far from the others'. The largest norm "
        "of its gradient in a run is smaller with each agent's own mean and spread than with shared ones, and so is the mean.",
        world="configs/ppo/claims/rare_agent.yaml",
        arms={"own statistics": [], "shared statistics": ["advantage.key=[prompt]"]},
        measures={
            "fourth agent, largest gradient": largest("rare/grad_norm"),
            "fourth agent, mean gradient": lambda done: fmean(done.updates("rare/grad_norm")),
            "the others, largest gradient": largest("strong/grad_norm"),
            "fourth agent, held out, %": of_agent("dan"),
        },
        comparisons=(
            Comparison("fourth agent, largest gradient", "own statistics", "shared statistics", -1),
            Comparison("fourth agent, mean gradient", "own statistics", "shared statistics", -1),
        ),
    ),
}  # fmt: skip
