"""A run in paragraphs: what the team is, how it was trained, what it learned, and whether talking helps."""

from collections.abc import Iterable
from typing import Any

from maporl.report.audit import audit_of
from maporl.report.charts import finite
from maporl.report.counts import counts_of
from maporl.report.findings import said
from maporl.report.language import counted, model_name, part_name, task_of
from maporl.report.read import Run
from maporl.report.result import first_screen
from maporl.report.tables import tables
from maporl.text import visible

Row = tuple[str, str]
"""The name of a property, and its value."""
_ENGINES = {"human": "a person", "random": "random moves", "python": "an engine that was passed in Python"}
"""Who speaks for an agent without a model."""
LONGEST = 160
"""The most characters of a question that stands for others."""


def story(run: Run) -> list[dict[str, str]]:
    """Paragraphs about a run, each with its title; those that the run has nothing for are left out."""
    shown = first_screen(run)
    notes = [(n, ", ".join(filter(None, [n["interval"], n["note"]]))) for n in shown["numbers"]]
    numbers = [(n["label"], f"{n['value']} ({note})" if note else n["value"]) for n, note in notes]
    learned = [*shown["verdict"], shown["about"], in_words(numbers), said("gain", counts_of(run))]
    parts = [
        ("The team", in_words(_team(run))),
        ("How it was trained", " ".join(filter(None, [in_words(_training(run)), reward(run)]))),
        ("What it learned", " ".join(filter(None, learned))),
        ("What did not happen?", " ".join(f"{severity}: {text}." for severity, text in audit_of(run).told())),
        *((table["title"], f"{table['about']} {_lines(table)}") for table in tables(run)),
        *((part["title"], part["text"]) for part in told(run)),
    ]
    return [{"title": title, "text": visible(text)} for title, text in parts if text]


def told(run: Run) -> list[dict[str, str]]:
    """The paragraphs that the page shows as sentences. The others are its first screen, its tables and its audit."""
    parts = [
        ("How do they use tools?", said("tools", *counts_of(run).calls)),
        ("Do the agents work with others?", said("others", *filter(None, [run.crossplay]))),
        ("What could not be read?", visible(" ".join(run.damaged))),
    ]
    return [{"title": title, "text": text} for title, text in parts if text]


def in_words(rows: Iterable[Row]) -> str:
    """Rows of two columns as sentences."""
    return " ".join(f"{name}: {value.removesuffix('.')}." for name, value in rows if value)


def _lines(table: dict[str, Any]) -> str:
    """The rows of a table as sentences."""
    names = [f"{name} " if len(table["columns"]) > 2 else "" for name in table["columns"][1:]]
    return in_words((row[0], ", ".join(map("".join, zip(names, row[1:], strict=True)))) for row in table["rows"])


def setup(run: Run) -> list[Row]:
    """The rows about the team, the task and the training. What the run does not record is left out."""
    return [(visible(name), visible(value)) for name, value in (*_team(run), *_training(run)) if value]


def reward(run: Run) -> str:
    """What the team is paid for, as far as the configuration says it."""
    return said("reward", run.section("reward"))


def _team(run: Run) -> list[Row]:
    c, said = counts_of(run), [u for one in run.dialogues for u in one.dialogue.utterances]
    people = dict.fromkeys((u.agent for u in said if u.tags.get("person")), "a person")
    speaks = {name: _speaker(run, run.agents().get(name) or {}) or "not recorded" for name in c.agents}
    rows = [(f"Agent {name}", people.get(name, speaker)) for name, speaker in speaks.items()]
    if c.game:
        return [*rows, ("Game", c.game)]
    protocol = run.section("protocol")
    turns = f", {counted(protocol['turns'], 'turn')}" if isinstance(protocol.get("turns"), int) else ""
    played = f"{part_name(protocol['name'])}{turns}" if protocol.get("name") else ""
    return [*rows, ("Protocol", played), ("Task", task_of(run)), ("One of its questions", _example(run))]


def _speaker(run: Run, section: dict[str, Any]) -> str:
    """What speaks for an agent, as far as its section says it."""
    if section.get("engine") in _ENGINES:
        return _ENGINES[section["engine"]]
    model, tiny = section.get("model") or (section.get("api") or {}).get("model"), section.get("tiny")
    output, parts = f"{run.config.get('output_dir')}/", []
    if tiny is not None:
        parts.append(" ".join(["tiny", *map(str, filter(None, [tiny.get("architecture")]))]))
        parts += [counted(tiny["layers"], "layer")] if "layers" in tiny else []
    elif isinstance(model, str) and model.startswith((output, "./")):
        parts.append(f"a model without a name, saved in {model.removeprefix(output).removeprefix('./')}")
    elif model:
        parts.append(model_name(str(model)))
    elif section.get("policy"):
        parts.append(f"speaks with {section['policy']}'s weights")
    parts += ["LoRA"] if section.get("lora") else ["with an adapter"] if section.get("adapter") else []
    return ", ".join([*parts, *(["frozen"] if section.get("trainable") is False else [])])


def _example(run: Run) -> str:
    """The shortest question of the run's first dialogues, with its right answer."""
    examples = [one.dialogue.example for one in run.dialogues[:500] if one.dialogue.example.question]
    if not examples:
        return ""
    shortest = min(examples, key=lambda e: (len(e.question), e.question))
    question = " ".join(shortest.question.split())
    short = question if len(question) <= LONGEST else f"{question[: LONGEST - 3]}..."
    return f"\u201c{short}\u201d" + (f" (right answer: {shortest.answer})" if shortest.answer else "")


def _training(run: Run) -> list[Row]:
    return [
        ("Rounds", said("rounds", run)) if run.section("loop").get("stages") else ("Updates", amount(run)),
        ("Held-out answers", said("answers", counts_of(run).temperatures[0])),
        ("Warm start", said("warm start", run.section("warm_start"))),
    ]


def amount(run: Run) -> str:
    """How many updates were made, of how many questions. Empty without an update."""
    if not (updates := run.updates()):
        return ""
    last, wanted, branching = updates[-1], run.config.get("updates"), run.section("branching")
    made = counted(last["step"], "update")
    if wanted is not None and not run.finished:
        made = f"{last['step']} of {counted(wanted, 'update')}"
    each = last["episode"] / last["step"] if finite(last.get("episode")) and last["step"] else 0
    group = branching.get("group", 1) if branching.get("how") == "independent" else 1
    size = counted(round(each), "game" if counts_of(run).game else "question")
    return made + (f" of {size} each" if each else "") + (f", each played {group} times" if each and group != 1 else "")
