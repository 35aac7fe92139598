"""What the driver says of the processes of groups: how they start, and the end of their logs where they fail.

Without Ray.
"""

import re
import subprocess
import sys
import time

import pytest
from ray_groups import Engine, Thread, spec

from maporl.config.command_line import known_errors
from maporl.errors import ConfigError
from maporl.integrations.ray.engine_pool import EnginePool
from maporl.integrations.ray.group import GroupFailed
from maporl.integrations.ray.member import end_of, log_of
from maporl.integrations.ray.ray_cluster import RayMember
from maporl.integrations.ray.section import FailuresSection


def test_an_error_repeats_the_last_20_lines_of_a_log(tmp_path):
    log = log_of(tmp_path, "ann learner 0")
    assert log == tmp_path / "logs/ann-learner-0.log"
    assert end_of(log) == f"its log {log} cannot be read (No such file or directory)"
    log.parent.mkdir()
    log.write_text("".join(f"line {number}\n" for number in range(1, 41)))
    lines = end_of(log).split("\n")
    assert lines == [f"the end of its log {log}:", *(f"  | line {number}" for number in range(21, 41))]
    log.write_bytes(b"x" * 200_000 + b"\nthe last \xff line")
    assert end_of(log).split("\n")[1:] == ["  | " + "x" * 300, "  | the last \ufffd line"]
    crash = ["Fatal Python error: Segmentation fault", "", *(f"frame {number}" for number in range(1, 41))]
    log.write_text("\n".join(["loading", *crash]))
    assert end_of(log).split("\n")[1:] == [f"  | {line}" for line in crash[:20]]
    again = ["2026-11-25 10:00:00: ann learner 0 is process 17", "loading"]
    log.write_text("\n".join(["loading", *crash, *again]))
    assert end_of(log).split("\n")[1:] == [f"  | {line}" for line in again], "the crash was that of an earlier process"


def test_a_process_prints_to_its_log_and_says_where_it_crashed(tmp_path):
    log = log_of(tmp_path, "ann engine 1")
    code = f"""
import faulthandler, sys
from pathlib import Path
from maporl.integrations.ray.member import print_to
print_to(Path({str(log)!r}), "ann engine 1")
print("loading")
sys.stdout.flush()
def deep():
    faulthandler._sigsegv()
deep()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout == done.stderr == ""
    text = log.read_text()
    assert ": ann engine 1 is process " in text.splitlines()[0] and text.splitlines()[1] == "loading"
    assert "Segmentation fault" in text and "in deep" in text
    assert "  | Fatal Python error" in end_of(log).splitlines()[1]


class FakeRay:
    """The errors of Ray that a member tells apart."""

    class exceptions:
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            cause: Exception

        class RayActorError(RayError):
            actor_init_failed = False

        class ActorDiedError(RayActorError):
            pass


def test_what_dies_or_raises_is_named_with_group_role_and_rank(tmp_path, capsys):
    log = log_of(tmp_path, "ann learner 1")
    log.parent.mkdir()
    log.write_text("step 3\nout of memory\n")
    member = RayMember(FakeRay, "ann learner 1", None, log, None)
    end = f"the end of its log {log}:\n  | step 3\n  | out of memory"
    died = member._told(FakeRay.exceptions.ActorDiedError())
    assert str(died) == f"ann learner 1: the process has ended or cannot be reached (ActorDiedError); {end}"
    raised = FakeRay.exceptions.RayTaskError()
    raised.cause = ConfigError("agents.ann.model: no such model")
    found = member._told(raised)
    assert found is raised.cause
    with pytest.raises(SystemExit), known_errors():
        raise found
    assert capsys.readouterr().err == f"error: agents.ann.model: no such model\nann learner 1 raised this; {end}\n"


def test_an_engine_that_does_not_load_its_model_in_time_is_named(tmp_path):
    class Stuck(Engine):
        def build(self):
            time.sleep(1.5)

    pool = EnginePool(
        spec(), lambda n, place: Thread(f"ann engine {n}", Stuck()), FailuresSection(deadline=0.1), tmp_path
    )
    file = tmp_path / "stacks/ann-engine-0.txt"
    message = f"ann engine 0: no model is loaded after 0.1 s (cluster.failures.deadline); its stacks are in {file}"
    with pytest.raises(GroupFailed, match=re.escape(message)):
        pool.build()
    assert file.read_text() == "stacks of ann engine 0"
