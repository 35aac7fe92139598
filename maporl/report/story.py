"""A run in sentences: what the team is, how it was trained, what it learned, and whether talking helps."""

from collections.abc import Iterable
from typing import Any

from maporl.evaluation.metrics import Difference, Evaluation, Share
from maporl.report.calling import calling, refusals
from maporl.report.charts import compared_names, finite
from maporl.report.crossplay import told
from maporl.report.dialogues import LAST_UPDATES, game_of, graded, last_answers, newest, right_share
from maporl.report.language import counted, few_updates, percent
from maporl.report.listening import knowledge_table, listening_table, speak_first_alone
from maporl.report.metric_panels import ACCURACY, Comparison
from maporl.report.names import agents_of, is_prompts, model_name, part_name
from maporl.report.read import Run
from maporl.text import visible
from maporl.types import Dialogue

Row = tuple[str, str]
"""The name of a property, and its value."""
TOOLS, OTHERS, UNREAD = "How do they use tools?", "Do the agents work with others?", "What could not be read?"
REFUSED = "Which requests were refused?"
"""The titles of the parts that a page shows as sentences."""
FEW = 6
"""With fewer updates than this, the first and the last of them are not compared."""


def story(run: Run) -> list[dict[str, str]]:
    """Paragraphs about a run, each with its title; those that the run has nothing for are left out."""
    game = is_game(run)
    tables = () if game else (knowledge_table(run), talking_table(run), listening_table(run))
    parts = [
        ("The team", _rows(_team(run))),
        ("How it was trained", " ".join([_rows(_training(run)), *learns_from(run)]).strip()),
        ("What it learned", _games(run) if game else _learned(run)),
        *((table["title"], _in_words(table)) for table in tables if table is not None),
        (TOOLS, calling(run)),
        (REFUSED, refusals(run)),
        (OTHERS, told(run.crossplay) if run.crossplay else ""),
        (UNREAD, " ".join(run.damaged)),
    ]
    return [{"title": title, "text": visible(text)} for title, text in parts if text]


def _in_words(table: dict[str, Any]) -> str:
    """A table of the page as text: what it is about, and a sentence for each row."""
    names = [f"{name} " if len(table["columns"]) > 2 else "" for name in table["columns"][1:]]
    rows = [
        (row[0], ", ".join(name + cell for name, cell in zip(names, row[1:], strict=True))) for row in table["rows"]
    ]
    return f"{table['about']} {_rows(rows)}"


def _rows(rows: Iterable[Row]) -> str:
    """Rows of two columns as sentences."""
    return " ".join(f"{name}: {value.removesuffix('.')}." for name, value in rows if value)


# -- what it is ---------------------------------------------------------------------------------------------------


def setup(run: Run) -> list[Row]:
    """The rows about the team, the task and the training. What the run does not record is left out."""
    return [(visible(name), visible(value)) for name, value in (*_team(run), *_training(run)) if value]


def is_game(run: Run) -> bool:
    """Whether the dialogues are games."""
    return any(game_of(one.dialogue) is not None for one in run.dialogues[:1])


def _team(run: Run) -> list[Row]:
    people = {u.agent for one in run.dialogues for u in one.dialogue.utterances if u.tags.get("person")}
    output, sections = str(run.config.get("output_dir")), run.agents()
    rows = [
        (f"Agent {name}", "a person" if name in people else speaker(sections.get(name) or {}, output) or "not recorded")
        for name in agents_of(run)
    ]
    if is_game(run):
        return [*rows, ("Game", game_of(run.dialogues[0].dialogue) or "")]
    protocol, task = run.section("protocol"), run.section("task")
    turns = f", {counted(protocol['turns'], 'turn')}" if isinstance(protocol.get("turns"), int) else ""
    played = f"{part_name(protocol['name'])}{turns}" if protocol.get("name") else ""
    name = "a data set of prompts" if is_prompts(run) else part_name(task.get("name") or "")
    return [*rows, ("Protocol", played), ("Task", name), ("One of its questions", example_of(run))]


def example_of(run: Run) -> str:
    """The shortest question of the run's first dialogues, with its right answer."""
    examples = [one.dialogue.example for one in run.dialogues[:500] if one.dialogue.example.question]
    if not examples:
        return ""
    shortest = min(examples, key=lambda e: (len(e.question), e.question))
    question = " ".join(shortest.question.split())
    short = question if len(question) <= 160 else f"{question[:157]}..."
    answer = f" (right answer: {shortest.answer})" if shortest.answer else ""
    return f"\u201c{short}\u201d{answer}"


def _training(run: Run) -> list[Row]:
    held_out = run.section("evaluation").get("temperature")
    return [
        ("Rounds", rounds(run)) if run.section("loop").get("stages") else ("Updates", amount(run)),
        ("Held-out answers", "" if held_out is None else _sampled(held_out)),
        ("Warm start", " ".join(warm_start(run))),
    ]


def _sampled(temperature: float) -> str:
    return "the likeliest ones" if temperature == 0 else f"sampled at temperature {temperature:g}"


def is_unfinished(run: Run) -> bool:
    """Whether updates of the run are still to be made."""
    return not run.finished and run.config.get("updates") is not None


def amount(run: Run) -> str:
    """How many updates were made, of how many questions. Empty without an update."""
    if not (updates := run.updates()):
        return ""
    last, wanted = updates[-1], run.config.get("updates")
    each = last["episode"] / last["step"] if finite(last.get("episode")) and last["step"] else 0
    size = f" of {counted(round(each), 'game' if is_game(run) else 'question')} each{_times(run)}" if each else ""
    made = counted(last["step"], "update")
    if wanted is not None and is_unfinished(run):
        made = f"{last['step']} of {counted(wanted, 'update')}"
    return made + size


def learns_from(run: Run) -> list[str]:
    """What the team is trained on, in sentences."""
    sources = run.section("reward").get("sources") or {}
    terms = [part_name(name) if weight == 1 else f"{weight:g} {part_name(name)}" for name, weight in sources.items()]
    return [f"The reward is {' + '.join(terms)}."] if terms else []


def rounds(run: Run) -> str:
    """How a loop trained the team."""
    loop, done = run.section("loop"), len(run.updates())
    if not done:
        return "No round has ended."
    of = f"in {counted(done, 'round')}" if run.finished else f"in {done} of {counted(loop['rounds'], 'round')} so far"
    stages = ", then ".join(map(_stage, loop["stages"]))
    return (
        f"The team was trained {of}. A round samples up to {counted(loop['questions'], 'question')} and then trains "
        f"{stages}."
    )


def _stage(stage: dict[str, Any]) -> str:
    build = stage.get("build")
    if build is None:  # a stage by updates has no builder
        return f"by {counted(stage['updates'], 'update')} of {stage['train'].upper()}"
    name = build if isinstance(build, str) else next(iter(build))
    return f"a reward model on {name}" if stage["train"] == "reward" else f"by {stage['train'].upper()} on {name}"


def _times(run: Run) -> str:
    """How often each question is played in an update, where it is more than once."""
    branching = run.section("branching")
    group = branching.get("group", 1)
    return f", each played {group} times" if branching.get("how") == "independent" and group != 1 else ""


def warm_start(run: Run) -> list[str]:
    """What the agents were taught before, and how they were made to differ, in sentences."""
    warm = run.section("warm_start")
    if not warm.get("steps"):
        return []
    told = [f"A supervised warm start of {counted(warm['steps'], 'step')} on written answers came first."]
    pupils = warm.get("agents") or {}
    if any(name not in pupils for name in run.agents()) and "wrong" in warm:
        told.append(f"Of these, {warm['wrong']:.0%} were wrong on purpose.")
    for name, pupil in pupils.items():
        if "skill" not in pupil:  # what it was taught is not known
            continue
        taught = f"the skill {pupil['skill']} and no other" if pupil.get("skill") else "answers to all questions"
        wrong, gives_in = pupil.get("wrong", 0), pupil.get("gives_in", 0)
        apart = f", {wrong:.0%} of its answers wrong on purpose" if wrong else ""
        repeats = f", and to repeat an answer that it hears {gives_in:.0%} of the time" if gives_in else ""
        told.append(f"{name} was taught {taught}{apart}{repeats}.")
    return [*told, "\u201cBefore training\u201d means after the warm start."]


# -- what it learned ----------------------------------------------------------------------------------------------


def _learned(run: Run) -> str:
    now = _share(run.after, -1)
    if run.after is not None and run.after.unlabelled and not is_game(run):
        return _rewarded(run.after, run.before)
    if now is not None:
        was = _share(run.before, -1)
        how = how_drawn(run)
        if was is None:
            return (
                f"After training, answers of the last turn are right {percent(now)} of the time on {now.total} "
                f"held-out questions.{how}"
            )
        told = (
            f"On {now.total} held-out questions, answers of the last turn were right {percent(was)} of the time before "
            f"training and {percent(now)} after it: "
        )
        gain = paired_gain(run)
        if gain is None:
            return f"{told}{100 * (now.value - was.value):+.1f} points.{how}"
        verdict = {
            1: "Chance in the choice of questions does not explain that.",
            -1: "The team got worse, and chance in the choice of questions does not explain that.",
            0: "The interval contains 0, so chance in the choice of questions may explain all of it.",
        }
        return f"{told}{gain.points()}. {verdict[gain.sign]}{how}"
    names = compared_names(run, ACCURACY, Comparison(last_turn=True))
    points = [(r["step"], value) for r in run.updates() for n in names if (value := finite(r.get(n))) is not None]
    if not points:
        return "" if run.dialogues or run.updates() else "Nothing has been trained yet."
    held_out = "No evaluation after training is recorded."
    if len(points) < FEW:
        return (
            f"On the training questions, answers of the last turn are right {points[-1][1]:.1%} of the time. {held_out}"
        )
    few = min(10, len(points) // 3)
    first, last = (sum(v for _, v in part) / len(part) for part in (points[:few], points[-few:]))
    return (
        f"On the training questions, answers of the last turn are right {last:.1%} of the time (mean of the last "
        f"{few_updates(few)}). In the first {few_updates(few)} they were right {first:.1%} of the time. {held_out}"
    )


def _rewarded(after: Evaluation, before: Evaluation | None) -> str:
    """Say what answers to questions without labels earned on average. The score is left out if it says the same."""
    told = [f"After training, answers to {counted(after.questions, 'held-out question')} earned on average"]
    names = [name for name in after.rewards if name.count("/") == 1]
    others = [name for name in names if name != "reward/score"]
    if len(others) == 1 and after.rewards[others[0]] == after.rewards.get("reward/score"):
        names = others
    for name in names:
        was = before.rewards.get(name) if before else None
        what = "in all" if name == "reward/score" else f"for {name.removeprefix('reward/')}"
        told.append(f"{after.rewards[name]:.4g} {what}" + (f" (before: {was:.4g})" if was is not None else ""))
    return f"{told[0]} {', '.join(told[1:])}."


def paired_gain(run: Run) -> Difference | None:
    """How much more often the last turn is right after training than before it, on the questions that both evaluations
    have. None without such questions.
    """
    before, after = (
        {d.example.id: right_share(d) for one in run.of(when) if graded(d := one.dialogue)}
        for when in ("before", "after")
    )
    pairs = [(before[name], after[name]) for name in after if name in before]
    return Difference.of(pairs) if pairs else None


def talking_gain(run: Run) -> Difference | None:
    """How much more often the last turn is right than the first, after training.

    None for games and for a single turn.
    """
    turns = len(run.after.turns) if run.after else 0
    pairs = [(right_share(d, 0), right_share(d)) for one in run.of("after") if graded(d := one.dialogue)]
    return Difference.of(pairs) if pairs and turns > 1 and not is_game(run) else None


def how_drawn(run: Run) -> str:
    """Why the charts of training differ from the held-out numbers, where they were sampled in different ways."""
    held_out, trained = run.section("evaluation").get("temperature"), run.section("ppo").get("temperature")
    if held_out is None or trained is None or held_out == trained:
        return ""
    return (
        f" Held-out answers are {_sampled(held_out)}, and answers in training are sampled at temperature {trained:g}, "
        "so the charts of training cannot be compared with the held-out numbers."
    )


def talking_table(run: Run) -> dict[str, Any] | None:
    """What talking is worth beside what one agent alone could do, as a table."""
    first, last = _share(run.after, 0), _share(run.after, -1)
    if run.after is None or (gain := talking_gain(run)) is None or first is None or last is None:
        return None
    rows = [["all agents, first turn", percent(first)], ["all agents, last turn", percent(last)]]
    rows.append(["last turn minus first, in points", gain.brief()])
    if (alone := best_alone(run)) is not None:
        best, difference = alone
        rows += [
            [f"the best agent alone, {best}, first turn", percent(run.after.turns[0].agents[best])],
            ["at least one agent, first turn", f"{_anybody(run, 0):.1%}"],
            ["at least one agent, last turn", f"{_anybody(run, -1):.1%}"],
            ["all agents in the last turn minus the best alone, in points", difference.brief()],
        ]
    return {
        "title": "Does talking help?",
        "about": f"Held-out questions, after training. {_answered_again(run.after)}",
        "columns": ["who", "right, with 95% intervals"],
        "rows": rows,
    }


def _answered_again(report: Evaluation) -> str:
    """How many answers changed from turn to turn, in a sentence."""
    corrected, spoiled = (sum(getattr(f, name) for f in report.flips) for name in ("wrong_to_right", "right_to_wrong"))
    answers = corrected + spoiled + sum(f.stayed_right + f.stayed_wrong for f in report.flips)
    return (
        f"Agents answered again {counted(answers, 'time')}: {counted(corrected, 'wrong answer')} became right, and "
        f"{counted(spoiled, 'right answer')} became wrong."
    )


def _both(report: Evaluation) -> list[str]:
    """The agents that answer in the first turn and in the last."""
    opening, closing = (report.turns[i].agents for i in (0, -1))
    return [name for name in opening if name in closing and opening[name].total and closing[name].total]


def best_alone(run: Run) -> tuple[str, Difference] | None:
    """The agent whose first answers are right most often, and how much more often the last turn of all agents is.

    None for a single agent, and where agents hear others in the first turn.
    """
    if run.after is None or not speak_first_alone(run.of("after")):
        return None
    both = _both(run.after)
    if len(both) < 2:
        return None
    opening = run.after.turns[0].agents
    best = max(both, key=lambda name: opening[name].value)
    difference = _against(run, best)
    return None if difference is None else (best, difference)


def _against(run: Run, agent: str) -> Difference | None:
    """How much more often the last turn of all agents is right than ``agent``'s first answer."""
    pairs = []
    for one in run.of("after"):
        correct = [grade.correct for turn in graded(one.dialogue)[:1] for u, grade in turn if u.agent == agent]
        if correct:
            pairs.append((float(bool(correct[0])), right_share(one.dialogue)))
    return Difference.of(pairs) if pairs else None


def _anybody(run: Run, turn: int) -> float:
    """The share of questions on which at least one answer of the turn is right."""
    turns = [graded(one.dialogue) for one in run.of("after")]
    right = [any(grade.correct for _, grade in each[turn]) for each in turns if each]
    return sum(right) / len(right)


def _share(report: Evaluation | None, turn: int) -> Share | None:
    """The share of a turn's answers that are right, over all agents; None where nothing was graded."""
    team = report.turns[turn].team if report is not None else None
    return team if team is not None and team.total else None


# -- games --------------------------------------------------------------------------------------------------------


def _games(run: Run) -> str:
    now, before = ([one.dialogue for one in part] for part in (newest(run), run.of("before")))
    if not now:
        told = "No game was played."
    elif run.of("after"):
        told = f"After training, the team played {counted(len(now), 'game')} of {game_of(now[0])}. {_results(now)}"
    else:
        told = (
            f"In the last {LAST_UPDATES} updates, {counted(len(now), 'game')} of {game_of(now[0])} were recorded. "
            f"{_results(now)}"
        )
    if before:
        told += f" Before training, it played {counted(len(before), 'game')}. {_results(before)}"
    return told


def _results(games: list[Dialogue]) -> str:
    """How many games ended with an illegal move, and how often each player won and what it was paid."""
    players = sorted({u.agent for game in games for u in game.utterances})
    illegal = sum(game.outcome == "illegal" for game in games)
    told = []
    for player in players:
        moves = [[u for u in game.utterances if u.agent == player] for game in games]
        moved = sum(map(bool, moves))
        won = sum(u.agent == player and bool(grade.correct) for game in games for u, grade in last_answers(game))
        paid = sum(finite(u.rewards.get("env")) or 0.0 for said in moves for u in said)
        told.append(
            f"{player} won {won} of the {counted(moved, 'game')} in which it moved and was paid {paid / moved:+.2f} a "
            "game on average."
        )
    return " ".join([f"{illegal} of them ended with an illegal move.", *told])


def speaker(section: dict[str, Any], output_dir: str) -> str:
    """What speaks for an agent, as far as its section says it."""
    if section.get("engine") in _ENGINES:
        return _ENGINES[section["engine"]]
    model, tiny = section.get("model") or (section.get("api") or {}).get("model"), section.get("tiny")
    parts = []
    if tiny is not None:
        parts.append(" ".join(["tiny", *map(str, filter(None, [tiny.get("architecture")]))]))
        parts += [counted(tiny["layers"], "layer")] if "layers" in tiny else []
    elif isinstance(model, str) and model.startswith((f"{output_dir}/", "./")):
        parts.append(f"a model without a name, saved in {model.removeprefix(f'{output_dir}/').removeprefix('./')}")
    elif model:
        parts.append(model_name(str(model)))
    elif section.get("policy"):
        parts.append(f"speaks with {section['policy']}'s weights")
    adapter = "LoRA" if section.get("lora") else "with an adapter" if section.get("adapter") else ""
    return ", ".join([*parts, *filter(None, [adapter]), *(["frozen"] if section.get("trainable") is False else [])])


_ENGINES = {"human": "a person", "random": "random moves", "python": "an engine that was passed in Python"}
