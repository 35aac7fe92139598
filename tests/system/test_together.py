"""What two processes do together although only one of them has work: sending weights, and training a verifier."""

import json

import processes
import pytest
from folders import ROOT, SUPPORT
from launches import ranks_of

WORKER = SUPPORT / "together_worker.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("together")
    variables = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "HF_HUB_OFFLINE": "1"}
    done = processes.end_of(ranks_of([WORKER, folder], 2, variables), 120)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return [json.loads((folder / f"rank{number}.json").read_text()) for number in range(2)]


@pytest.mark.slow
def test_a_process_without_a_question_does_not_hold_up_the_one_that_asks_a_server(found):
    """With one held-out question, one process asks the engine and the other does not."""
    main, other = (part["rollouts"] for part in found)
    assert main["loads"] == ["ann", "bob", "ann", "bob"], "the weights of the start, and those after the update"
    assert other["loads"] == []


def test_several_processes_are_told_to_send_weights_together(found):
    for part in found:
        assert (
            "'ann': its servers have not got its weights; call the engine's sync('ann') in all 2"
            in part["rollouts"]["early"]
        )


def test_a_server_that_refuses_weights_ends_every_process_with_its_message(found):
    for part in found:
        assert "no room for another adapter" in part["rollouts"]["refused"]


def test_a_verifier_that_keeps_learning_is_the_same_in_every_process(found):
    main, other = (part["verifiers"] for part in found)
    assert main["before"] != other["before"]
    assert main["after"] == other["after"] not in (main["before"], other["before"])
    assert main["logged"] == other["logged"] and main["logged"][0]["verifier/pairs"] == 2.0
    assert main["left"] == other["left"] == 0
