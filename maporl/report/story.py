"""What a run's numbers say, in sentences: what the team is, how it was trained, what it learned, whether talking helps."""

from typing import Any

from maporl.evaluation.metrics import Evaluation, Share
from maporl.report.charts import compared_names, finite
from maporl.report.dialogues import LAST_UPDATES, game_of, graded, last_answers, newest, right_share
from maporl.report.language import Difference, counted, listed, percent
from maporl.report.metric_panels import ACCURACY, Comparison
from maporl.report.read import Run
from maporl.text import visible
from maporl.types import Dialogue

FEW = 6
"""Updates below which there is no course to speak of."""


def story(run: Run) -> list[dict[str, str]]:
    """Headed paragraphs, in plain words."""
    game = is_game(run)
    parts = [
        ("The team", _team(run)),
        ("How it was trained", _training(run)),
        ("What it learned", _games(run) if game else _learned(run)),
        ("Does talking help?", "" if game else _talking(run)),
    ]
    return [{"title": title, "text": visible(text)} for title, text in parts if text]


def is_game(run: Run) -> bool:
    """Whether the dialogues are games."""
    return any(game_of(one.dialogue) is not None for one in run.dialogues[:1])


def _team(run: Run) -> str:
    people = {u.agent for one in run.dialogues for u in one.dialogue.utterances if u.tags.get("person")}
    names = [f"{name} ({'a person' if name in people else _model(section)})" for name, section in run.agents().items()]
    if not names:
        names = sorted({u.agent for one in run.dialogues for u in one.dialogue.utterances})
    who = listed(names) or "Agents that have not spoken yet"
    protocol, task = run.section("protocol"), run.section("task")
    turns = f" of {counted(protocol['turns'], 'turn')}" if isinstance(protocol.get("turns"), int) else ""
    told = f"{who}. Protocol: {protocol.get('name', 'debate')}{turns}." if protocol or names else f"{who}."
    what = "" if is_game(run) else task.get("name", "")
    if what:
        told += f" Task: {what}{_example(run)}."
    return told


def _example(run: Run) -> str:
    """A question of the run, as short as there is one."""
    examples = [one.dialogue.example for one in run.dialogues[:500] if one.dialogue.example.question]
    if not examples:
        return ""
    shortest = min(examples, key=lambda e: (len(e.question), e.question))
    question = " ".join(shortest.question.split())
    short = question if len(question) <= 160 else f"{question[:157]}..."
    return f", for example \u201c{short}\u201d (right answer: {shortest.answer})"


def _training(run: Run) -> str:
    updates = run.updates()
    wanted = run.config.get("updates")
    if not updates:
        return "No update has been made." if wanted is not None and not run.dialogues else ""
    last = updates[-1]
    done = counted(last["step"], "update")
    if not run.finished and wanted is not None:
        done = f"So far {last['step']} of {counted(wanted, 'update')}"
    each = last["episode"] / last["step"] if finite(last.get("episode")) and last["step"] else 0
    told = done + (f", each of {counted(round(each), 'game' if is_game(run) else 'question')}" if each else "")
    ppo, reward = run.section("ppo"), run.section("reward")
    if ppo.get("objective"):
        told += f"; objective {ppo['objective']}"
    if reward.get("sources"):
        terms = [name if weight == 1 else f"{weight:g} {name}" for name, weight in reward["sources"].items()]
        told += f"; reward: {' + '.join(terms)}"
    told += "."
    warm = run.section("warm_start")
    if warm.get("steps"):
        told += (
            f" Before that {counted(warm['steps'], 'step')} of supervised warm start on written answers, {warm.get('wrong', 0):.0%} of them "
            "wrong on purpose; \u201cbefore training\u201d means after the warm start."
        )
    return told


# -- what it learned ----------------------------------------------------------------------------------------------


def _learned(run: Run) -> str:
    now = _share(run.after, -1)
    if now is not None:
        was = _share(run.before, -1)
        how = _how_drawn(run)
        if was is None:
            return f"After training, the last turn is right on {percent(now)} of {now.total} held-out questions.{how}"
        told = (
            f"On {now.total} held-out questions, answers of the last turn were right {percent(was)} of the time before training and "
            f"{percent(now)} after it"
        )
        gain = paired_gain(run)
        if gain is None:
            return f"{told}: {100 * (now.value - was.value):+.1f} points.{how}"
        verdict = {
            1: "That is more than the luck of which questions were drawn.",
            -1: "It got worse, by more than the luck of which questions were drawn.",
            0: "The interval contains 0: the luck of which questions were drawn may be all there is to it.",
        }
        return f"{told}: {gain.points()}. {verdict[gain.sign]}{how}"
    names = compared_names(run, ACCURACY, Comparison(last_turn=True))
    points = [(r["step"], value) for r in run.updates() for n in names if (value := finite(r.get(n))) is not None]
    if not points:
        return "" if run.dialogues else "Nothing has been trained yet."
    held_out = "There is no evaluation on held-out questions after training."
    if len(points) < FEW:
        return f"On the questions it trains on, answers of the last turn are right {points[-1][1]:.1%} of the time. {held_out}"
    few = min(10, len(points) // 3)
    first, last = (sum(v for _, v in part) / len(part) for part in (points[:few], points[-few:]))
    return (
        f"On the questions it trains on, answers of the last turn are right {last:.1%} of the time (mean of the last {few} updates); in the "
        f"first {few} it was {first:.1%}. {held_out}"
    )


def paired_gain(run: Run) -> Difference | None:
    """Of the last turn's accuracy by training, on the questions of both evaluations; None where there are none."""
    before, after = (
        {d.example.id: right_share(d) for one in run.of(when) if graded(d := one.dialogue)}
        for when in ("before", "after")
    )
    pairs = [(before[name], after[name]) for name in after if name in before]
    return Difference.of(pairs) if pairs else None


def talking_gain(run: Run) -> Difference | None:
    """Of accuracy from the first turn to the last, after training."""
    turns = len(run.after.turns) if run.after else 0
    pairs = [(right_share(d, 0), right_share(d)) for one in run.of("after") if graded(d := one.dialogue)]
    return Difference.of(pairs) if pairs and turns > 1 and not is_game(run) else None


def _how_drawn(run: Run) -> str:
    """Why the charts of training differ from the held-out numbers."""
    held_out, trained = run.section("evaluation").get("temperature"), run.section("ppo").get("temperature")
    if held_out is None or trained is None or held_out == trained:
        return ""
    own = "the likeliest ones" if held_out == 0 else f"sampled at temperature {held_out:g}"
    return f" Held-out answers are {own}, those in training are sampled at temperature {trained:g}, so the charts of training are not to be compared with them."


def _talking(run: Run) -> str:
    gain = talking_gain(run)
    first, last = _share(run.after, 0), _share(run.after, -1)
    if run.after is None or gain is None or first is None or last is None:
        return ""
    opening, closing = (run.after.turns[i].agents for i in (0, -1))
    both = [name for name in opening if name in closing and opening[name].total and closing[name].total]
    best = max(both, key=lambda name: opening[name].value) if len(both) > 1 else None
    alone = None if best is None else _against(run, best)
    better = alone is None or alone.sign == 1
    verdict = {
        1: "Yes" if better else "On average yes",
        -1: "No, it hurts",
        0: "Not so that it could be told from chance",
    }[gain.sign]
    told = f"{verdict}: answers of the first turn are right {percent(first)} of the time, those of the last {percent(last)}: {gain.points()}."
    flips = run.after.flips
    corrected, spoiled = sum(f.wrong_to_right for f in flips), sum(f.right_to_wrong for f in flips)
    answers = corrected + spoiled + sum(f.stayed_right + f.stayed_wrong for f in flips)
    told += f" Of {counted(answers, 'answer')} that came after another one, {corrected} were corrected and {spoiled} spoiled."
    if best is not None and alone is not None:
        told += (
            f" {listed([f'{name} goes from {opening[name].value:.1%} to {closing[name].value:.1%}' for name in both])}."
        )
        doubt = {1: "better", -1: "worse", 0: "not to be told apart"}[alone.sign]
        told += (
            f" Against the best of them alone ({best} in the first turn, {opening[best].value:.1%}) the last turn of all is {doubt}: "
            f"{alone.points()}."
        )
        known, kept = (_anybody(run, turn) for turn in (0, -1))
        told += f" Somebody is right on {known:.1%} of the questions in the first turn, on {kept:.1%} in the last."
    return told


def _against(run: Run, agent: str) -> Difference | None:
    """The last turn of all agents less ``agent``'s first answer."""
    pairs = []
    for one in run.of("after"):
        own = [grade.correct for turn in graded(one.dialogue)[:1] for u, grade in turn if u.agent == agent]
        if own:
            pairs.append((float(bool(own[0])), right_share(one.dialogue)))
    return Difference.of(pairs) if pairs else None


def _anybody(run: Run, turn: int) -> float:
    """The share of questions on which at least one answer of the turn is right."""
    turns = [graded(one.dialogue) for one in run.of("after")]
    own = [any(grade.correct for _, grade in each[turn]) for each in turns if each]
    return sum(own) / len(own)


def _share(report: Evaluation | None, turn: int) -> Share | None:
    """All agents' answers of a turn; None where nothing was graded."""
    own = report.turns[turn].team if report is not None else None
    return own if own is not None and own.total else None


# -- games --------------------------------------------------------------------------------------------------------


def _games(run: Run) -> str:
    now = [one.dialogue for one in newest(run)]
    when = "after training" if run.of("after") else f"in the last {LAST_UPDATES} updates, of which some are recorded"
    told = f"{counted(len(now), 'game')} of {game_of(now[0])} {when}: {_results(now)}" if now else "No game was played."
    before = [one.dialogue for one in run.of("before")]
    return told + (f" Before training, of {len(before)}: {_results(before)}" if before else "")


def _results(games: list[Dialogue]) -> str:
    """Who won how often and was paid how much."""
    players = sorted({u.agent for game in games for u in game.utterances})
    illegal = sum(game.outcome == "illegal" for game in games)
    told = []
    for player in players:
        moves = [[u for u in game.utterances if u.agent == player] for game in games]
        moved = sum(map(bool, moves))
        won = sum(u.agent == player and bool(grade.correct) for game in games for u, grade in last_answers(game))
        paid = sum(finite(u.rewards.get("env")) or 0.0 for own in moves for u in own)
        told.append(
            f"{player} won {won} of the {moved} in which it moved and was paid {paid / moved:+.2f} on average in them"
        )
    return f"{illegal} ended by an illegal move; {listed(told)}."


def _model(section: dict[str, Any]) -> str:
    if section.get("engine") == "human":
        return "a person"
    if section.get("tiny") is not None:
        tiny = section["tiny"]
        what = f"tiny {tiny.get('architecture', 'llama')}, {counted(tiny.get('layers', 3), 'layer')}"
    else:
        what = str(
            section.get("model")
            or (section.get("api") or {}).get("model")
            or f"speaks with {section.get('policy')}'s weights"
        )
    return what + (", LoRA" if section.get("lora") else "") + ("" if section.get("trainable", True) else ", frozen")
