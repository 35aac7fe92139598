"""The claims that ``benchmarks/claims.py`` tests. Each expectation was written down before the claim's first run."""

from collections.abc import Callable
from dataclasses import dataclass
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
class Claim:
    """What a paper claims, and how it is tested: a world's configuration, and the arms as overrides of it."""

    title: str
    paper: str
    expectation: str
    world: str
    arms: dict[str, list[str]]
    measures: dict[str, Callable[[Run], float]]
    comparisons: tuple[Comparison, ...]


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
        arms={"alpha 0": [], "alpha 1": alphas(1), "alpha 3": alphas(3)},
        measures={"wrong to right, %": flips("wrong_to_right"), "right to wrong, %": flips("right_to_wrong"), FINAL: team(-1)},
        comparisons=(
            Comparison("wrong to right, %", "alpha 3", "alpha 0", 1),
            Comparison("right to wrong, %", "alpha 3", "alpha 0", -1),
        ),
    ),
}  # fmt: skip
