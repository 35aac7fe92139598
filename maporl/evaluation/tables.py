"""Tables that show evaluations in a terminal."""

from collections.abc import Sequence

from rich.table import Table

from maporl.evaluation.metrics import SCORE, Evaluation, Share, TurnReport
from trl_ext.learning.audit import Audit


def cell(share: Share | None) -> str:
    """Return a share and its interval in percent, such as ``62.5 [58.2, 66.6]``; ``-`` for an unknown share."""
    if share is None or not share.total:
        return "-"
    low, high = share.interval()
    return f"{share.value:.1%} [{low:.1%}, {high:.1%}]".replace("%", "")


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


def evaluation_table(now: Evaluation, before: Evaluation | None = None, columns: Sequence[str] = ("now",)) -> Table:
    """Return a table of an evaluation: turns, agents, votes, agreement, baselines and mean rewards. Without labels it
    has the rewards alone.

    Args:
        now: the evaluation.
        before: an earlier one, for the first of two columns.
        columns: what stands above ``now``, or above both.
    """
    what, intervals = ("mean rewards", "") if now.unlabelled else ("right in %", ", 95% intervals")
    table = Table(title=f"{now.questions} questions, {now.tokens} tokens sampled, {what}{intervals}")
    for heading in ("turn", "who", *columns):
        table.add_column(heading, justify="left" if heading == "who" else "right", no_wrap=True)
    table.caption = not_measured(now) or None
    for number, turn in enumerate(() if now.unlabelled else now.turns):
        old = _shares(before.turns[number]) if before and number < len(before.turns) else {}
        rows = _shares(turn)
        for position, (who, share) in enumerate(rows.items(), 1):
            cells = [cell(old.get(who)), cell(share)][-len(columns) :]
            table.add_row("" if position > 1 else str(number + 1), who, *cells, end_section=position == len(rows))
    for name, share in now.baselines.items():
        table.add_row("", name, *["-"] * (len(columns) - 1), cell(share))
    for name, mean in shown_rewards(now):
        earlier = before.rewards.get(name) if before else None
        cells = ["-" if earlier is None else f"{earlier:.4g}", f"{mean:.4g}"][-len(columns) :]
        table.add_row("", name, *cells)
    return table


def _shares(turn: TurnReport) -> dict[str, Share]:
    """Return the shares of a turn by who has them. One agent is the team, its own majority, and agrees with itself."""
    all_agents = {"all agents": turn.team, "majority vote": turn.majority, "agreement": turn.agreement}
    return {**turn.agents, **(all_agents if len(turn.agents) != 1 else {})}


def flip_lines(evaluation: Evaluation) -> list[str]:
    """Return one line for each pair of turns: how many answers changed, with shares and their 95% intervals in %."""
    return [
        f"turn {n} -> {n + 1}: {f.wrong_to_right} wrong to right ({cell(f.shares()['improved'])}), "
        f"{f.right_to_wrong} right to wrong ({cell(f.shares()['declined'])}), "
        f"{f.stayed_right} stayed right, {f.stayed_wrong} stayed wrong"
        for n, f in enumerate(evaluation.flips, 1)
    ]
