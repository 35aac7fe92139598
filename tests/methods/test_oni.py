"""The source annotator: an agent's notes on what others observe become their reward (ONI)."""

import json
from pathlib import Path

import processes
import pytest
import torch.distributed as dist
from launches import free_port
from scripted_training import played, recipe_values, scripted_trainer

from maporl import Dialogue, Example, Utterance
from maporl.errors import ConfigError
from maporl.methods.oni import Annotator, observed
from maporl.methods.sections import AnnotatorSection
from maporl.playground.arithmetic import Arithmetic
from maporl.types import Call, Result
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run
from trl_ext.process import distributed

TASK = Arithmetic(largest=9)


def step(number, order, agent, shown):
    return Utterance(number, agent, agent, order, order, [{"role": "user", "content": shown}], "x")


def dialogue(*shown):
    return Dialogue(Example("e", "find it", ""), [step(n, n, "ann", text) for n, text in enumerate(shown)])


def annotator(answers, **options):
    """An annotator that says what ``answers`` has for an observation, and a list of what it was asked."""
    asked = []

    def speak(agent, conversations):
        assert agent == "eve" and all(len(own) == 1 and own[0]["role"] == "user" for own in conversations)
        asked.extend(own[0]["content"] for own in conversations)
        return [answers[own[0]["content"]] for own in conversations]

    return Annotator(AnnotatorSection("eve", **({"prompt": "{observation}"} | options)), speak), asked


def test_oni_pays_what_was_noted_of_the_observation_and_nothing_of_an_unknown_one(tmp_path):
    """oni: a look-up that misses earns 0, one that hits earns label x coefficient (0.1), beside what the game pays."""
    values = recipe_values("oni", tmp_path)
    values["protocol"]["options"] = {"size": 2, "walls": 0, "limit": 2, "progress": 0.0}
    values["training"]["per_device_train_batch_size"] = 12

    def script(request):
        if request.example.id.startswith("judged"):
            grid = request.ask.messages[-1]["content"].splitlines()[1]
            return "Label: 1" if grid[0] == "A" else "Label: 0"
        return "D" if request.ask.agent == "second" else "U"

    trainer = scripted_trainer(values, script)
    source = trainer.player.scorer.sources["annotator"]
    first = played(trainer)
    for u in (u for d in first.dialogues for u in d.utterances):
        assert u.rewards.get("annotator", 0.0) == 0.0 and u.rewards["score"] == pytest.approx(u.rewards["env"])
    found = source.after_update(1, first.dialogues, first.task)
    assert found["annotations/known"] == 0.0 and found["annotations/unreadable"] == 0.0
    again = played(trainer)
    hits = 0
    for d in again.dialogues:
        for u, following in zip(d.utterances, d.utterances[1:], strict=False):
            known = source._asked(d, u, again.task) in source.notes
            label = float(known and "is a wall): A" in following.messages[-1]["content"])
            hits += label
            assert u.rewards["annotator"] == label
            assert u.rewards["score"] == pytest.approx(u.rewards["env"] + 0.1 * label)
        assert "annotator" not in d.utterances[-1].rewards, "nothing was observed after the last move"
    assert hits > 0


def test_the_notes_of_oni_are_kept_and_asked_for_once(tmp_path):
    """oni, recipe and code: labels come once for each observation, the latest first, and are part of checkpoints."""
    source, asked = annotator({"b": "Label: 1", "c": "no", "d": "Label: 7"}, per_update=2)
    said = [dialogue("a", "b", "c"), dialogue("a", "c", "d")]
    assert source(said, TASK) == [[0.0, 0.0, None], [0.0, 0.0, None]]
    assert source.after_update(1, said, TASK) == {
        "annotations/known": 0.0, "annotations/notes": 2.0, "annotations/unreadable": 0.5, "annotations/label": 1.0,
    }  # fmt: skip
    assert asked == ["d", "c"], "two an update, the latest first"
    assert source(said, TASK) == [[0.0, 0.0, None], [0.0, 1.0, None]], "7 of at most 1 is 1, and c has no label"
    assert source.after_update(2, said, TASK)["annotations/known"] == 0.25
    assert asked == ["d", "c", "b"]
    source.save(tmp_path)
    assert json.loads((tmp_path / "notes.json").read_text()) == {"d": 1.0, "c": None, "b": 1.0}
    other, asked = annotator({})
    other.load(tmp_path)
    assert other(said, TASK) == source(said, TASK) == [[1.0, 0.0, None], [0.0, 1.0, None]]
    other.after_update(3, said, TASK)
    assert asked == []


def test_labels_are_asked_for_every_few_updates_and_scaled():
    source, asked = annotator({"b": "Label: 3"}, every=2, largest=4.0)
    said = [dialogue("a", "b")]
    assert source.after_update(1, said, TASK) == {"annotations/known": 0.0, "annotations/notes": 0.0} and asked == []
    source.after_update(2, said, TASK)
    assert source(said, TASK) == [[0.75, None]]


def test_only_what_read_finds_is_the_observation():
    source, asked = annotator({"find it: 4": "Label: 1"}, prompt="{question}: {observation}", read=r"room (\d)")
    source.after_update(1, [dialogue("a", text) for text in ("step 1, room 4", "step 2, room 4", "no")], TASK)
    assert asked == ["find it: 4"]
    assert source([dialogue("a", "step 9, room 4", "lost")], TASK) == [[1.0, None, None]]


def test_what_an_utterance_leads_to():
    caller = step(0, 0, "ann", "q")
    caller.calls = [Call("0.0", "look", {}, None, Result("a key")), Call("0.1", "look", {}, None, Result("a door"))]
    together = [step(1, 1, "bob", "for bob"), step(2, 1, "ann", "for ann")]
    said = Dialogue(Example("e", "q", ""), [caller, *together])
    assert observed(said, caller) == "a key\n\na door"
    caller.calls = []
    assert observed(said, caller) == "for ann", "the same agent, if it speaks next"
    assert observed(said, together[0]) is None
    caller.agent = "cy"
    assert observed(said, caller) == "for bob"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (None, r"reward\.annotator: the source 'annotator' needs it"),
        ({"agent": "first"}, r"reward\.annotator\.agent: 'first' must be one of"),
        ({"agent": "annotator", "prompt": "Good?"}, r"it must contain \{observation\}"),
        ({"agent": "annotator", "read": "("}, "read: '\\(' is not a regular expression"),
        ({"agent": "annotator", "every": 0}, "every"),
    ],
)
def test_an_annotator_that_cannot_serve_is_refused(options, message, tmp_path):
    values = recipe_values("oni", tmp_path)
    values["reward"]["annotator"] = options
    with pytest.raises(ConfigError, match=message):
        check_run(from_dict(values, "test"))


def annotate_in(rank, port, folder):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    source, asked = annotator({letter: f"Label: {number}" for number, letter in enumerate("bcde")}, largest=3.0)
    said = [[dialogue("a", "b", "c"), dialogue("a", "d")], [dialogue("a", "c", "e")]][rank]
    found = source.after_update(1, said, TASK)
    quiet = source.after_update(2, said, TASK)
    Path(folder, f"rank{rank}.json").write_text(json.dumps([asked, source.notes, found, quiet]))
    distributed.shutdown()


@pytest.mark.slow
def test_two_processes_share_the_asking_and_keep_the_same_notes(tmp_path):
    port = free_port()
    ranks = [processes.SERVER.Process(target=annotate_in, args=(rank, port, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
        assert process.exitcode == 0
    (asked, notes, *found), (asked_too, notes_too, *found_too) = (
        json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)
    )
    assert sorted(asked + asked_too) == ["b", "c", "d", "e"] and len(asked) == len(asked_too) == 2
    assert notes == notes_too == {"b": 0.0, "c": 1 / 3, "d": 2 / 3, "e": 1.0} and found == found_too
    assert found[0]["annotations/known"] == 0.0 and found[1]["annotations/known"] == 1.0
