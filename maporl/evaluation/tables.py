"""Tables that show evaluations in a terminal."""

from rich.table import Table
from rich.text import Text

from maporl.evaluation.crossplay import CrossPlay
from maporl.evaluation.metrics import SCORE, Evaluation, Share
from trl_ext.learning.audit import Audit


def cell(share: Share | None) -> str:
    """Return a share and its interval in percent, such as ``62.5 [58.2, 66.6]``; ``-`` for an unknown share."""
    if share is None or not share.total:
        return "-"
    low, high = share.interval()
    return f"{share.value:.1%} [{low:.1%}, {high:.1%}]".replace("%", "")


def before_after(before: Evaluation | None, after: Evaluation) -> Table:
    """Return a table of the accuracy per turn and agent and of the mean score, before and after training. Without
    labels it has the mean rewards alone."""
    what = "mean rewards" if after.unlabelled else "accuracy in %"
    intervals = "" if after.unlabelled else ", 95% intervals"
    table = Table(title=f"Held-out {what}, {after.questions} questions{intervals}")
    for heading in ("turn", "who", "before", "after"):
        table.add_column(heading, justify="left" if heading == "who" else "right", no_wrap=True)
    table.caption = not_measured(after) or None
    for number, turn in enumerate(() if after.unlabelled else after.turns):
        old = before.turns[number] if before and number < len(before.turns) else None
        rows = [(agent, old.agents.get(agent) if old else None, share) for agent, share in turn.agents.items()]
        rows += [
            ("all agents", old.team if old else None, turn.team),
            ("majority", old.majority if old else None, turn.majority),
        ]
        for position, (who, was, now) in enumerate(rows):
            table.add_row(
                str(number + 1) if position == 0 else "",
                who,
                cell(was),
                cell(now),
                end_section=position == len(rows) - 1,
            )
    for name, mean in shown_rewards(after):
        earlier = before.rewards.get(name) if before else None
        table.add_row("", name, "-" if earlier is None else f"{earlier:.4g}", f"{mean:.4g}")
    return table


def learned(before: Evaluation | None, after: Evaluation) -> str:
    """Return in one line what a run ended with, and what came of talking."""
    name = SCORE if SCORE in after.rewards else next(iter(after.rewards), "")
    earlier = before.rewards.get(name) if before else None
    was = "" if earlier is None else f"{earlier:.4g} before, "
    paid = f"{name} {was}{after.rewards[name]:.4g} after training" if name else "nothing was graded"
    if after.unlabelled or not after.turns:
        return f"held out: {paid}"
    final, first = after.final(), after.turns[0].team
    was = f"{before.final().value:.1%} before, " if before and before.turns and before.final().total else ""
    line = f"held out: {was}{final.value:.1%} of the last answers right after training"
    if len(after.turns) > 1 and first.total:
        line += f", and {first.value:.1%} of the first ones (talking: {100 * (final.value - first.value):+.1f} points)"
    return line if after.rewards.get(name) == after.rewards.get("reward/label") else f"{line}; {paid}"


def shown_rewards(evaluation: Evaluation) -> list[tuple[str, float]]:
    """Return the mean rewards that a table shows: all without labels, and beside accuracies the score."""
    return [(name, mean) for name, mean in evaluation.rewards.items() if evaluation.unlabelled or name == SCORE]


def not_measured(evaluation: Evaluation) -> str:
    """Return in one sentence which reward sources the score of an evaluation is without, and why. Empty if none is."""
    left_out = "; ".join(f"{name}: {why}" for name, why in evaluation.unmeasured.items())
    return f"The score is without rewards that an evaluation does not ask for ({left_out})." if left_out else ""


def audit_table(done: Audit, part: str = "") -> Table:
    """Return a table of what each learner was asked, and learned from, in a ``part`` of the run or in all of it."""
    table = Table(title=f"What {part or 'the run'} did")
    columns, rows = done.table()
    for number, heading in enumerate(columns):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def evaluation_table(evaluation: Evaluation) -> Table:
    """Return a table of one evaluation: turns, agents, votes, agreement and baselines."""
    table = Table(title=f"{evaluation.questions} questions, {evaluation.tokens} tokens sampled, 95% intervals")
    for heading in ("turn", "who", "accuracy in %"):
        table.add_column(heading, justify="left" if heading == "who" else "right", no_wrap=True)
    for number, turn in enumerate(evaluation.turns, 1):
        rows = list(turn.agents.items())
        if len(rows) != 1:  # one agent is the team, its own majority, and agrees with itself
            rows += [("all agents", turn.team), ("majority vote", turn.majority), ("agreement", turn.agreement)]
        for position, (who, share) in enumerate(rows, 1):
            ends = position == len(rows) and number == len(evaluation.turns)
            table.add_row(str(number), who, cell(share), end_section=ends)
    for name, share in evaluation.baselines.items():
        table.add_row("", name, cell(share))
    for name, mean in shown_rewards(evaluation):
        table.add_row("", name, f"{mean:.4g}")
    table.caption = not_measured(evaluation) or None
    return table


def flip_lines(evaluation: Evaluation) -> list[str]:
    """Return one line for each pair of turns: how many answers changed, with shares and their 95% intervals in %."""
    return [
        f"turn {n} -> {n + 1}: {f.wrong_to_right} wrong to right ({cell(f.shares()['improved'])}), "
        f"{f.right_to_wrong} right to wrong ({cell(f.shares()['declined'])}), "
        f"{f.stayed_right} stayed right, {f.stayed_wrong} stayed wrong"
        for n, f in enumerate(evaluation.flips, 1)
    ]


def crossplay_table(play: CrossPlay) -> Table:
    """Return the matrix of cross-play. The diagonal, which has the teams that trained together, is bold."""
    asked = f"{play.questions} questions" + (" that no run was trained on" if play.left_out else "")
    table = Table(title=f"Accuracy of the last turn in %, {asked}, 95% intervals")
    two = len(play.seats) == 2
    table.add_column(f"{play.seats[0]} of" if two else "team of", no_wrap=True)
    for name in play.runs:
        table.add_column(f"{play.seats[1]} of {name}" if two else f"one agent of {name}", justify="right", no_wrap=True)
    for row, (name, cells) in enumerate(zip(play.runs, play.matrix(), strict=True)):
        table.add_row(name, *(Text(cell(share), "bold" if row == column else "") for column, share in enumerate(cells)))
    return table
