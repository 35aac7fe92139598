"""Tables that show evaluations in a terminal."""

from rich.table import Table
from rich.text import Text

from maporl.evaluation.crossplay import CrossPlay
from maporl.evaluation.metrics import Evaluation, Share
from trl_ext.learning.audit import Audit


def cell(share: Share | None) -> str:
    """Return a share and its interval in percent, such as ``62.5 [58.2, 66.6]``; ``-`` for an unknown share."""
    if share is None or not share.total:
        return "-"
    low, high = share.interval()
    return f"{share.value:.1%} [{low:.1%}, {high:.1%}]".replace("%", "")


def before_after(before: Evaluation | None, after: Evaluation) -> Table:
    """Return a table of the accuracy per turn and agent, or of the mean rewards, before and after training."""
    what = "mean rewards" if after.rewards else "accuracy in %"
    intervals = "" if after.rewards else ", 95% intervals"
    table = Table(title=f"Held-out {what}, {after.questions} questions{intervals}")
    for heading in ("turn", "who", "before", "after"):
        table.add_column(heading, justify="left" if heading == "who" else "right", no_wrap=True)
    for name, mean in after.rewards.items():
        earlier = before.rewards.get(name) if before else None
        table.add_row("", name, "-" if earlier is None else f"{earlier:.4g}", f"{mean:.4g}")
    if after.rewards:
        return table
    for number, turn in enumerate(after.turns):
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
    return table


def learned(before: Evaluation | None, after: Evaluation) -> str:
    """Return in one line what a run ended with, and what came of talking."""
    if after.rewards or not after.turns:
        name = "reward/score" if "reward/score" in after.rewards else next(iter(after.rewards), None)
        if name is None:
            return "held out: nothing was graded"
        earlier = before.rewards.get(name) if before else None
        told = "" if earlier is None else f"{earlier:.4g} before, "
        return f"held out: {name} {told}{after.rewards[name]:.4g} after training"
    final, first = after.final(), after.turns[0].team
    was = f"{before.final().value:.1%} before, " if before and before.turns and before.final().total else ""
    line = f"held out: {was}{final.value:.1%} of the last answers right after training"
    if len(after.turns) > 1 and first.total:
        line += f", and {first.value:.1%} of the first ones (talking: {100 * (final.value - first.value):+.1f} points)"
    return line


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
    for name, mean in evaluation.rewards.items():
        table.add_row("", name, f"{mean:.4g}")
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
