"""The matrix of cross-play as a table that shows it in a terminal."""

from rich.table import Table
from rich.text import Text

from maporl.evaluation.tables import cell
from maporl.studies.crossplay.result import CrossPlay


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
