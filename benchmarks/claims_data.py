"""The claims that ``benchmarks/claims.py`` tests. Each expectation was written down before the claim's first run."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import correlation, fmean
from typing import Literal

from claims_verifier import USUAL, VARIED, Lore
from learning import GRPO_ON_GAMES, Run, late, of_agent, team

Means = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Comparison:
    """The ``measure`` of ``arm`` minus that of ``against``, and the sign that the paper claims for it."""

    measure: str
    arm: str
    against: str
    direction: Literal[1, -1]


@dataclass(frozen=True)
class Lesson:
    """A run that an arm builds on.

    It starts from the warm-started weights of its world, or it is only the warm start.
    """

    world: str
    sets: list[str] | None


@dataclass(frozen=True)
class Claim:
    """What a paper claims, and how it is tested: a world's configuration, and the arms as overrides of it.

    ``<NAME>`` in an override is the folder of the run of that lesson with the same seed. For each arm in ``verifiers``
    and each seed a verifier is made from answers of the world's warm-started agents, and the arm knows the URL of its
    server.
    """

    title: str
    paper: str
    expectation: str
    world: str
    arms: dict[str, list[str]]
    measures: dict[str, Callable[[Run], float]]
    comparisons: tuple[Comparison, ...]
    lessons: dict[str, Lesson] = field(default_factory=dict)
    verifiers: dict[str, Lore] = field(default_factory=dict)
    remark: Callable[[Means], str] | None = None
    """Words that follow the verdicts, such as on an expectation without a comparison.

    They are made from the means of all arms.
    """


def flips(kind: str) -> Callable[[Run], float]:
    """The percent of held-out answers that change so from the first turn to the second, after training."""

    def measure(done: Run) -> float:
        counts = done.evaluation("after")["flips"][0]
        return 100 * counts[kind] / sum(counts[k] for k in KINDS)

    return measure


GDPO = "advantage.multi_objective_aggregation=normalize_then_sum"
KINDS = ("wrong_to_right", "right_to_wrong", "stayed_right", "stayed_wrong")
LISTENERS = "configs/ppo/claims/listeners.yaml"


def frozen(agent: str) -> list[str]:
    """The override with which ``agent`` never learns."""
    return [f"schedule.freeze=[{{agent: {agent}, first: 1, last: 1000000}}]"]


def alphas(value: float) -> list[str]:
    """The override that sets the four weights of the collaboration bonus."""
    return [f"reward.bonus={{alpha: [{value}, {value}, {value}, {value}]}}"]


FLAT = ["branching={group: 5}", "advantage.key=[prompt, agent]"]
"""The overrides that play five dialogues, where C3 plays two letters and four guesses to each."""
SURE = ["agents.guesser.sampling={temperature: 0.1}"]
WEANED = ["agents.boss.model=<weaned>/final/boss"]
SFT = "{train: sft, build: {threshold: {above: 0.5}}, learning_rate: 1.0e-3}"
DPO = "{train: dpo, build: {siblings: {above: 0.5}}, roles: [verifier, refiner], beta: 0.2, learning_rate: 3.0e-4}"
STILL = ["updates=1", "training.learning_rate=0", "training.value_learning_rate=0"]
"""The overrides with which a run trains nothing."""
SECOND_PAIR = [
    *STILL,
    "agents.bob.model=<strangers>/initial/bob",
    "warm_start.agents.bob.skill=previous",
    "task.skills=[next, previous]",
]


JUDGED = ["reward.sources={verifier: 1.0}", "reward.verifier={}"]
"""The overrides with which the scores of a served verifier pay."""
UNPAID = ["reward.sources={label: 0.0}", "updates=40"]
"""The overrides with which a right answer pays nothing."""


def largest(*names: str) -> Callable[[Run], float]:
    """The largest value that any of these metrics has in a run."""
    return lambda done: max(max(done.updates(name)) for name in names)


def late_kl(*policies: str) -> Callable[[Run], float]:
    """The KL to the reference in nats per answer, over the last 10 updates and those of the ``policies`` that learn."""
    return lambda done: fmean(late(name)(done) for p in policies if done.updates(name := f"{p}/objective/kl"))


def ended(policy: str) -> Callable[[Run], float]:
    """How many answers ``policy`` sampled to their end in training, in thousands."""
    return lambda done: sum(done.updates(f"{policy}/val/num_eos_tokens")) / 1000


def asking(fade: str = "") -> str:
    """The override that pays 0.2 for starting sub-agents and 0.2 for their finishing."""
    options = f"weights: {{started: 0.2, called/reply_form: 0.2}}{', ' + fade if fade else ''}"
    return f"reward.rules=[{{mix: {{{options}}}}}, last]"


def calls_asked(done: Run) -> float:
    """How many sub-agents are asked for each held-out question, after training."""
    return fmean(sum(u["caller"] is not None for u in dialogue["utterances"]) for dialogue in done.dialogues("after"))


def offline(*stages: str) -> str:
    """The override that trains a round of an outer loop, on 320 questions."""
    return f"loop={{rounds: 1, questions: 320, stages: [{', '.join(stages)}]}}"


def first_and_last(done: Run) -> list[tuple[bool, bool]]:
    """Whether the first and the last answer to each held-out question are right, after training."""
    ends = [[u["grade"]["correct"] for u in d["utterances"] if u["answers"]] for d in done.dialogues("after")]
    return [(answers[0], answers[-1]) for answers in ends]


def last_right(done: Run) -> float:
    """The percent of held-out questions whose last answer is right."""
    return 100 * fmean(last for _, last in first_and_last(done))


def spoilt(done: Run) -> float:
    """The percent of right first answers after which the last answer is wrong."""
    return 100 * fmean(not last for first, last in first_and_last(done) if first)


def letters_right(done: Run) -> float:
    """The percent of held-out numbers for which the sender says the letter of the guesser's code, after training."""
    said = [dialogue["utterances"][0] for dialogue in done.dialogues("after")]
    return 100 * fmean(u["text"][:1] == "abcd"[int(u["messages"][-1]["content"].strip()[-1]) - 1] for u in said)


def fidelity(done: Run) -> float:
    """The correlation of a signal's advantage with what the signal is worth, over the signals of all updates.

    A signal's worth is the mean score of the guesses after *other* signals of the update that say the same of the same
    number, minus the mean over all other signals of that number.
    """
    pairs = []
    for sent in signals_sent(done):
        for number, (state, letter, advantage, _) in enumerate(sent):
            others = [(said, worth) for k, (of, said, _, worth) in enumerate(sent) if k != number and of == state]
            same = [worth for said, worth in others if said == letter]
            if same:
                pairs.append((advantage, fmean(same) - fmean(worth for _, worth in others)))
    return correlation(*zip(*pairs, strict=True))


def signals_sent(done: Run) -> list[list[tuple[str, str, float, float]]]:
    """For each update, its signals: the number, the letter, the advantage and the mean score of the guesses that follow
    it."""
    updates: dict[int, dict[tuple, list[tuple]]] = {}
    for line in (done.folder / "dialogues.jsonl").read_text().splitlines():
        dialogue = json.loads(line)
        sent, *guessed = dialogue["utterances"]
        place = (dialogue["prompt"], sent["sample"] or dialogue["rollout"])
        if guessed and sent["trace"]:  # one copy of a signal that dialogues share has the trace
            row = (
                sent["messages"][-1]["content"],
                sent["text"],
                sent["trace"]["advantages"][0],
                sent["rewards"]["credit"],
            )
            updates.setdefault(dialogue["step"], {}).setdefault(place, []).append(row)
    return [[rows[0] for rows in signals.values()] for _, signals in sorted(updates.items())]


CORY = [
    "agents.pioneer.policy=null",
    "agents.observer.policy=null",
    "schedule.swap={agents: [pioneer, observer], every: 5}",
]
ALONE = ["protocol={name: debate, turns: 1, agents: [pioneer]}", "reward.rules=[own]"]
LARGE_STEPS = ["training.learning_rate=1.5e-3"]
FINAL = "final turn, %"
FLIPS = {"wrong to right, %": flips("wrong_to_right"), "right to wrong, %": flips("right_to_wrong"), FINAL: team(-1)}
FOR_THE_BETTER = (
    Comparison("wrong to right, %", "alpha 3", "alpha 0", 1),
    Comparison("right to wrong, %", "alpha 3", "alpha 0", -1),
)
"""More wrong answers become right with the bonus than without it, and fewer right ones wrong."""
CLAIMS = {
    "co_training": Claim(
        title="Training both agents gains more than training one",
        paper="MAPoRL (arXiv 2502.18439)",
        expectation="Two specialists are each right on half of the questions, and can gain only by listening. If both learn, the "
        "team's final turn is right on more of the held-out questions than if ann alone or bob alone learns. The "
        "first turn stays at 50% in all arms.",
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
        measures=FLIPS,
        comparisons=FOR_THE_BETTER,
    ),
    "incentives_alone": Claim(
        title="The bonus for collaboration makes answers change for the better, where nothing else does",
        paper="MAPoRL (arXiv 2502.18439)",
        expectation="For two agents that are paid for their labels, the bonus makes the gain of a right second answer 1 + alpha "
        "instead of 1, whatever the first was: it changes the size of rewards and not their order, which whitening "
        "removes (the claim above). Here a right answer pays nothing, so the bonus alone can tell a good change from "
        "a bad one. With alpha 3 more wrong answers become right, and fewer right answers become wrong, than with "
        "alpha 0.",
        world=LISTENERS,
        remark=lambda mean: "In other words: where labels pay, the bonus only makes the reward of a right second answer larger, and "
        "whitening divides the size out again.",
        arms={"alpha 0": UNPAID, "alpha 3": [*UNPAID, *alphas(3)]},
        measures=FLIPS,
        comparisons=FOR_THE_BETTER,
    ),
    "transfer": Claim(
        title="Listening that was learned with one partner is of use with another",
        paper="MAPoRL (arXiv 2502.18439), transfer to other data sets",
        expectation="Ann knows one skill. She learns to listen to a partner with a second skill, on questions of these two "
        "skills. Then she is asked for her own and for a third skill, beside an untrained partner who knows the "
        "third. Her final answer is right more often than before she had learned to listen.",
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
        "letters, which pay nobody. With credit shared over the later turn both learn to say what they see, and their "
        "guesses are right far more often than by chance, which is 33%. With the reward of their own turn alone they "
        "stay there.",
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
        "gives one answer in four and is right about one time in four, so its rewards lie far from the others'. The "
        "largest norm of its gradient in a run is smaller with each agent's own mean and spread than with shared "
        "ones, and so is the mean.",
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
    "cory": Claim(
        title="A pair that exchanges roles stays nearer to its reference than an agent trained alone",
        paper="CORY (arXiv 2410.06101)",
        expectation="A model is right one time in five. Two copies of it learn as pioneer and observer, for the sum of their "
        "rewards, or one copy learns alone, with the same PPO and as many answers of its own. Over the last 10 "
        "updates CORY's KL to the reference is lower (the paper: less than half) and its first speaker is right more "
        "often. With a learning rate five times as large, PPO alone collapses, and CORY does not.",
        world="configs/ppo/claims/cory.yaml",
        arms={"CORY": CORY, "PPO alone": ALONE, "CORY, large steps": CORY + LARGE_STEPS, "PPO alone, large steps": ALONE + LARGE_STEPS},
        measures={
            "KL, nats": late_kl("pioneer", "observer", "shared"),
            "first speaker, training, %": lambda done: 100 * late("accuracy/turn_1/pioneer")(done),
            "first speaker, held out, %": of_agent("pioneer"),
        },
        comparisons=tuple(
            Comparison(measure, "CORY" + steps, "PPO alone" + steps, direction)
            for steps in ("", ", large steps")
            for measure, direction in (("KL, nats", -1), ("first speaker, training, %", 1))
        ),
        remark=lambda mean: f"CORY's KL is {mean['CORY']['KL, nats'] / mean['PPO alone']['KL, nats']:.0%} of PPO alone's. The "
        "paper says less than half.",
    ),
    "agentpo": Claim(
        title="Training only a collaborator raises the accuracy of a frozen actor",
        paper="AgentPO (openreview 5L8uyzjn2l)",
        expectation="An actor knows one skill, and repeats what it hears eight times in ten. A collaborator knows another skill, and "
        "says that or repeats the actor's draft, at random. The actor never learns. After the collaborator has "
        "learned, the actor's second answer is right on more held-out questions than beside the untrained "
        "collaborator, and on more than the actor alone answers right.",
        world="configs/ppo/claims/critic.yaml",
        arms={
            "trained collaborator": [],
            "untrained collaborator": STILL,
            "actor alone": [*STILL, "protocol={name: debate, turns: 1, agents: [actor]}", "reward.rules=[own]", "schedule.freeze=[]"],
        },
        measures={"actor, %": of_agent("actor")},
        comparisons=tuple(
            Comparison("actor, %", "trained collaborator", against, 1) for against in ("untrained collaborator", "actor alone")
        ),
    ),
    "verifier": Claim(
        title="A learned verifier can take the place of labels",
        paper="MAPoRL (arXiv 2502.18439)",
        expectation="A verifier is trained on labelled answers of the untrained agents to the training questions, and served by "
        "HTTP. The team that learns from its scores is right on more held-out questions than the untrained team, by "
        "the labels. It ends within 10 points of the team that learns from labels.",
        world="configs/ppo/claims/judged.yaml",
        arms={"verifier": JUDGED, "labels": [], "untrained": STILL},
        measures={FINAL: team(-1), "first turn, %": team(0)},
        comparisons=(Comparison(FINAL, "verifier", "untrained", 1),),
        verifiers={"verifier": USUAL},
        remark=lambda mean: f"The verifier's team ends {mean['labels'][FINAL] - mean['verifier'][FINAL]:.1f} points behind the "
        "team that learns from labels. It was expected to be at most 10 points behind.",
    ),
    "varied_verifier": Claim(
        title="A verifier must have learned from varied errors",
        paper="MAPoRL (arXiv 2502.18439)",
        expectation="At the usual temperatures the untrained agents err in one way, and a verifier of their answers pays for errors "
        "that come up only once a team learns: one digit wrong, or a digit said twice. Another verifier learns from "
        "answers that were sampled at temperatures up to 3. Its team is right on more held-out questions than the "
        "untrained team and than the first verifier's team, and ends within 5 points of the team that learns from labels.",
        world="configs/ppo/claims/judged.yaml",
        arms={"verifier": JUDGED, "varied verifier": JUDGED, "labels": [], "untrained": STILL},
        measures={FINAL: team(-1), "first turn, %": team(0)},
        comparisons=(
            Comparison(FINAL, "varied verifier", "untrained", 1),
            Comparison(FINAL, "varied verifier", "verifier", 1),
        ),
        verifiers={"verifier": USUAL, "varied verifier": VARIED},
        remark=lambda mean: "The mean of the varied verifier's team minus that of the team that learns from labels is "
        f"{mean['varied verifier'][FINAL] - mean['labels'][FINAL]:+.1f} points.",
    ),
    "at_grpo": Claim(
        title="Candidates compared in one state teach more than whole games compared with each other",
        paper="AT-GRPO (github.com/pettingllms-ai/PettingLLMs)",
        expectation="Two agents walk a token through a grid, in turns. With as many sampled answers (50 and 40 updates), the team that compares four "
        "candidates for each move, all made in the same state, solves more of the held-out grids than the team that "
        "compares four whole games from the same start.",
        world="configs/ppo/claims/small_grid.yaml",
        arms={"AT-GRPO": [], "GRPO": [*GRPO_ON_GAMES, "updates=40"]},
        measures={"solved, %": team(0), "answers that ended, thousands": ended("shared")},
        comparisons=(Comparison("solved, %", "AT-GRPO", "GRPO", 1),),
    ),
    "c3": Claim(
        title="Continuing a message several times says more of its worth than sampling more messages",
        paper="C3 (arXiv 2603.06859)",
        expectation="A sender learns which letter a hot guesser, who errs often, takes for which number. C3 samples two letters for each "
        "number and four guesses to each; flat sampling takes five letters with one guess each, which are as many "
        "utterances. The advantages of C3's letters agree better with what the letters are worth, and after 80 "
        "updates its sender is right more often. With a guesser who never errs, replaying adds nothing, and the gain "
        "vanishes. In a run with another seed the flat sender ended ahead.",
        world="configs/ppo/claims/signals.yaml",
        arms={"C3": [], "flat": FLAT, "C3, sure guesser": SURE, "flat, sure guesser": [*FLAT, *SURE]},
        measures={"letters, %": letters_right, "agreement with the worth": fidelity},
        comparisons=(
            *(Comparison(measure, "C3", "flat", 1) for measure in ("letters, %", "agreement with the worth")),
            Comparison("letters, %", "C3, sure guesser", "flat, sure guesser", 1),
        ),
    ),
    "parl": Claim(
        title="Pay for asking, which fades, teaches an orchestrator to ask",
        paper="PARL (Kimi K2.5 report)",
        expectation="An orchestrator can answer only if it asks two frozen specialists. It knows how to ask, and has learned to do so hardly ever, "
        "because steps cost and nothing else counted. Now right answers pay. With 0.2 for starting sub-agents and 0.2 "
        "for their finishing, which fade to 0 in 20 updates, it asks more often after 40 updates and is right on more "
        "held-out questions than if only right answers pay. If asking is paid to the end, it is right no more often "
        "than if the pay fades.",
        world="configs/ppo/claims/rare_calls.yaml",
        arms={"outcome alone": WEANED, "fading pay": [*WEANED, asking("fade: 20")], "lasting pay": [*WEANED, asking()]},
        measures={"right, %": team(-1), "calls a question": calls_asked},
        comparisons=(
            Comparison("right, %", "fading pay", "outcome alone", 1),
            Comparison("calls a question", "fading pay", "outcome alone", 1),
        ),
        lessons={
            "weaned": Lesson(
                "configs/ppo/claims/rare_calls.yaml",
                ["updates=10", "reward.sources={label: 0.0, critical_steps: -1.0}", "evaluation.questions=0"],
            )
        },
        remark=lambda mean: f"With lasting pay it is right on {mean['lasting pay']['right, %']:.1f}% and asks "
        f"{mean['lasting pay']['calls a question']:.1f} times.",
    ),
    "r_zero": Claim(
        title="A challenger and a solver teach themselves without data",
        paper="R-Zero (arXiv 2508.05004)",
        expectation="A solver of sums is right about a third of the time. A challenger writes sums, and the majority of ten answers counts as right. After 80 "
        "updates, of which each learns in half, the solver is right on more of the held-out sums than before, "
        "although nobody told it an answer. It is right more often than with a challenger that goes on writing any "
        "sums, after as many updates of its own. In trials on seeds 10 and 11 it rose by 15 and by 2 points. The "
        "first run of this claim, at the fast rate, was expected to rise too: it fell by 10.2 points, which chance "
        "may do (-22.3 to +1.8), and is kept here as an arm.",
        world="configs/ppo/claims/self_posed.yaml",
        arms={
            "untrained": STILL,
            "R-Zero": [],
            "any sums": ["updates=40", "schedule.round_robin=null", "schedule.freeze=[{agent: challenger, first: 1, last: 1000}]"],
            "fast rate": ["training.learning_rate=5.0e-4"],
        },
        measures={"held out, %": team(-1)},
        comparisons=(
            Comparison("held out, %", "R-Zero", "untrained", 1),
            Comparison("held out, %", "R-Zero", "any sums", 1),
            Comparison("held out, %", "R-Zero", "fast rate", 1),
        ),
    ),
    "malt": Claim(
        title="A pipeline learns offline from a tree of its own answers",
        paper="MALT (arXiv 2412.01928)",
        expectation="A generator, a verifier and a refiner answer sums, and each is wrong three times in ten. One round of SFT on what mostly led to right "
        "answers raises the final answers over those of the untrained team. DPO of the verifier and the refiner after "
        "it lowers the share of right drafts that are spoilt, and raises the final answers further. The paper reports "
        "both. Training on policy with the same tree, on as many utterances, does as well as SFT and DPO. In a run "
        "with another seed both raised the final answers by 23 points, and DPO added one.",
        world="configs/ppo/claims/checked_sums.yaml",
        arms={"untrained": STILL, "SFT": [offline(SFT)], "SFT and DPO": [offline(SFT, DPO)], "on policy": ["updates=20"]},
        measures={"final answers, %": last_right, "spoilt, %": spoilt},
        comparisons=(
            Comparison("final answers, %", "SFT", "untrained", 1),
            Comparison("final answers, %", "SFT and DPO", "SFT", 1),
            Comparison("spoilt, %", "SFT and DPO", "SFT", -1),
        ),
        remark=lambda mean: f"On policy the final answers are right on {mean['on policy']['final answers, %']:.1f}%.",
    ),
    "gdpo": Claim(
        title="Rewards that are normalised apart improve each of them",
        paper="GDPO (arXiv 2601.05242)",
        expectation="An agent is paid for right answers, which differ much in a group, and for short ones, which differ little. GRPO adds the "
        "two rewards and then normalises; GDPO normalises each alone and then adds. The paper reports more of every "
        "reward: answers over the last 10 updates are right more often and are shorter. In one run with another seed "
        "GDPO gave up right answers for short ones instead, since both weigh alike; with a tenth of the weight on "
        "shortness it should do neither worse.",
        world="configs/ppo/claims/two_rewards.yaml",
        arms={"GRPO": [], "GDPO": [GDPO], "GDPO, a tenth": [GDPO, "reward.sources={label: 1.0, brevity: 0.1}"]},
        measures={"right, %": lambda done: 100 * late("reward/label")(done), "length, tokens": late("ann/completions/mean_length")},
        comparisons=tuple(
            Comparison(measure, arm, "GRPO", direction)
            for arm in ("GDPO", "GDPO, a tenth")
            for measure, direction in (("right, %", 1), ("length, tokens", -1))
        ),
    ),
}  # fmt: skip
