"""The protocol forum, played by a script."""

from scripted_dialogues import credited, play

from maporl import Forum


def test_a_forum_pays_solver_and_evaluator_from_one_score():
    words = {"solver": "4", "evaluator": "fine", "scorer": "so <score>2</score>"}
    script = lambda request: words[request.ask.role]  # noqa: E731
    forum = Forum(rounds=3, memory=1)
    dialogue, prompts = play(forum, script, ("ann", "bob", "cy"))
    assert [u.role for u in dialogue.utterances] == ["solver", "evaluator", "scorer"] * 3
    assert [u.rewards["peer"] for u in dialogue.utterances] == [0.5, 0.5, 0.0] * 3
    assert credited(dialogue, ("own",), {"peer": 1.0}) == [0.5, 0.5, 0.0] * 3
    assert (
        "score>2" not in prompts[3][1] and prompts[6][1].count("solver: 4") == 1
    )  # scores are never shown, old rounds forgotten
    assert len({u.agent for u in dialogue.utterances}) == 3
    silent, _ = play(forum, lambda request: "4", ("ann", "bob", "cy"))
    assert [u.rewards["peer"] for u in silent.utterances][:3] == [0.0, 0.0, -1.0]
