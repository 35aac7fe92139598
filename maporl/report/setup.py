"""What a run is: its team, its task, and how it was trained, as rows of a table."""

from maporl.report.language import counted
from maporl.report.names import agents_of, is_prompts, part_name
from maporl.report.read import Run
from maporl.report.story import amount, example_of, is_game, rounds, speaker, warm_start
from maporl.text import visible

Row = tuple[str, str]
"""The name of a property, and its value."""


def setup(run: Run) -> list[Row]:
    """The rows about the team, the task and the training. What the run does not record is left out."""
    rows = [*_team(run), *_task(run), *_training(run)]
    return [(visible(name), visible(value)) for name, value in rows if value]


def _team(run: Run) -> list[Row]:
    people = {u.agent for one in run.dialogues for u in one.dialogue.utterances if u.tags.get("person")}
    output, sections = str(run.config.get("output_dir")), run.agents()
    return [
        (f"Agent {name}", "a person" if name in people else speaker(sections.get(name) or {}, output) or "not recorded")
        for name in agents_of(run)
    ]


def _task(run: Run) -> list[Row]:
    protocol, task = run.section("protocol"), run.section("task")
    turns = f", {counted(protocol['turns'], 'turn')}" if isinstance(protocol.get("turns"), int) else ""
    played = f"{part_name(protocol['name'])}{turns}" if protocol.get("name") and not is_game(run) else ""
    name = "a data set of prompts" if is_prompts(run) else part_name(task.get("name") or "")
    return [("Protocol", played), ("Task", "" if is_game(run) else name), ("One of its questions", example_of(run))]


def _training(run: Run) -> list[Row]:
    held_out = run.section("evaluation").get("temperature")
    return [
        ("Rounds", rounds(run)) if run.section("loop").get("stages") else ("Updates", amount(run)),
        ("Held-out answers", _drawn(held_out)),
        ("Warm start", " ".join(warm_start(run))),
    ]


def _drawn(temperature: float | None) -> str:
    """How answers are sampled."""
    if temperature is None:
        return ""
    return "the likeliest ones" if temperature == 0 else f"sampled at temperature {temperature:g}"
