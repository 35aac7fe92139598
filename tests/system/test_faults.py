"""Kills, signals, damaged checkpoints and full disks. A resumed run equals an undisturbed one."""

import contextlib
import dataclasses
import errno
import io
import itertools
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from types import MethodType, SimpleNamespace

import processes
import pytest
from folders import SUPPORT
from tiny_runs import UPDATES, assert_same_end, config_of, end_of, start

import trl_ext.learning.checkpoint
from maporl.config.parse import to_yaml
from maporl.runs import train as run
from trl_ext.files.checkpoints import list_checkpoints, newest_whole
from trl_ext.files.manifest import CheckpointError, verify
from trl_ext.process.interruptions import Interruptions, Terminated
from trl_ext.process.waits import Discarded, Threads, check, pause, result, until
from trl_ext.trainer.loop import PPOLoop


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a run leaves that was not interrupted."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    run.train(config_of(folder), resume=False, quiet=True)
    return end_of(folder)


def assert_same_final(end, undisturbed):
    """The same records and final weights; checkpoints may have been written in other ways."""
    (weights, *records), (expected, *calm) = end, undisturbed
    assert records == calm
    for key in (k for k in expected if k.startswith("final")):
        assert all(value.equal(weights[key][n]) for n, value in expected[key].items()), key


def updates(folder):
    file = folder / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_as_a_calm_one(undisturbed, tmp_path):
    """SIGKILL in rollouts, updates and checkpoint writes, wherever it falls; each time the run is started again."""
    folder, rng, kills, torn = tmp_path / "run", random.Random(7), 10, 0

    def begin():
        return start(tmp_path, config_of(folder), *(["--resume"] if (folder / "config.yaml").exists() else []))

    for kill in range(kills):
        process = begin()
        first = kill * (UPDATES - 2) // kills  # the kill comes at some moment of the update after this many
        while updates(folder) < first and process.poll() is None:
            time.sleep(0.005)
        moment = time.time() + rng.uniform(0, 0.3)
        while updates(folder) <= first and time.time() < moment:
            time.sleep(0.005)
        assert process.poll() is None, process.output()[1]
        process.kill()
        torn += len(list(folder.glob(".partial-*")))
    assert begin().wait() == 0
    print(f"{kills} kills, {torn} in the middle of a checkpoint")
    assert_same_end(end_of(folder), undisturbed)
    assert [p.name for p in list_checkpoints(folder)] == [f"checkpoint-{UPDATES - 1}", f"checkpoint-{UPDATES}"]


@pytest.mark.slow
def test_a_run_that_saves_in_the_background_is_killed_and_ends_as_a_calm_one(undisturbed, tmp_path):
    folder, rng = tmp_path / "run", random.Random(8)
    config = config_of(folder, async_save=True)
    for kill in range(4):
        process = start(tmp_path, config, *(["--resume"] if kill else []))
        first = kill * (UPDATES - 2) // 4 + 1
        while updates(folder) < first and process.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
    resumed = start(tmp_path, config, "--resume")
    assert resumed.wait() == 0, resumed.output()[1]
    assert_same_final(end_of(folder), undisturbed)
    names = [p.name for p in list_checkpoints(folder)]
    assert names == [f"checkpoint-{UPDATES - 1}", f"checkpoint-{UPDATES}"]


def wait_for(path, lines, process, seconds=60):
    until = time.time() + seconds
    while time.time() < until and process.poll() is None:
        if path.exists() and len(path.read_text().splitlines()) >= lines:
            return
        time.sleep(0.02)
    raise AssertionError(f"{path}: {lines} lines did not come; {process.output()[1]}")


@pytest.mark.parametrize("name, status", [pytest.param("SIGTERM", 143, marks=pytest.mark.slow), ("SIGINT", 130)])
def test_a_signal_saves_and_ends_the_run_which_goes_on(undisturbed, tmp_path, name, status):
    folder = tmp_path / "run"
    config = config_of(folder, save_steps=0)
    process = start(tmp_path, config)
    wait_for(folder / "metrics.jsonl", 2, process)
    process.send_signal(getattr(signal, name))
    _, shown = process.communicate(timeout=60)
    assert process.returncode == status, shown
    saved = list_checkpoints(folder)
    assert len(saved) == 1
    told = (
        f"{name}: stopped after update {saved[0].name.split('-')[1]} of {UPDATES}; saved in {saved[0]}; to go on: "
        f"maporl train {folder}/config.yaml --resume"
    )
    assert shown.splitlines()[-1 if name == "SIGTERM" else 0] == told, shown
    assert not (folder / "final").exists()
    assert (folder / "report.html").exists() == (name == "SIGINT"), "who asks for a quick end gets one"
    resumed = start(tmp_path, config, "--resume")
    _, shown = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, shown
    assert_same_final(end_of(folder), undisturbed)


def outer_and_inner(moment):
    """One handler of signals inside another, and a signal at ``moment``. Return what each of them had heard."""
    heard = []

    def signalled(now):
        if now == moment:
            os.kill(os.getpid(), signal.SIGTERM)

    outer = Interruptions()
    try:
        with outer, outer.droppable():
            with contextlib.suppress(Discarded):  # as a library that swallows everything
                signalled("before, and swallowed")
            signalled("before")
            with Interruptions() as inner:
                signalled("in what cannot be dropped")
                with contextlib.suppress(Discarded), inner.droppable():
                    signalled("in what can be dropped")
                    heard.append("ran")
                heard.append(inner.asked)
                if inner.asked:
                    raise inner.error
                signalled("after the last look")
            signalled("after")
            heard.append("went on")
    except (Discarded, Terminated) as ended:
        heard.append(type(ended).__name__)
    return heard, outer.asked


@pytest.mark.parametrize("moment, heard", [
    ("never", ["ran", 0, "went on"]),
    ("before, and swallowed", [15, "Terminated"]),
    ("before", ["Discarded"]),
    ("in what cannot be dropped", [15, "Terminated"]),
    ("in what can be dropped", [15, "Terminated"]),
    ("after the last look", ["ran", 0, "Discarded"]),
    ("after", ["ran", 0, "Discarded"]),
])  # fmt: skip
def test_a_signal_is_heard_wherever_one_handler_stands_inside_another(moment, heard):
    before = signal.getsignal(signal.SIGTERM)
    assert outer_and_inner(moment) == (heard, 0 if moment == "never" else signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before and Interruptions._innermost is None


RANK = """
import pathlib, sys, time
from trl_ext.process.interruptions import Interruptions, Terminated
from trl_ext.process.waits import Discarded, pause
with Interruptions() as interruptions:
    pathlib.Path(sys.argv[1], "ready").touch()
    try:
        with interruptions.droppable():
            pause(60)
    except Discarded:
        pathlib.Path(sys.argv[1], interruptions.name).touch()
"""


@pytest.mark.parametrize("rank, ends", [({"LOCAL_RANK": "0"}, True), ({}, False)])
def test_a_rank_ends_with_its_launcher_and_a_program_outlives_its_shell(tmp_path, rank, ends):
    """A rank without its launcher would train on for ever, and hold its device."""
    (tmp_path / "rank.py").write_text(RANK)
    start_it = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, *sys.argv[1:]]).pid, flush=True); input()"
    )
    command = [sys.executable, "-c", start_it, str(tmp_path / "rank.py"), str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"} | rank
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=environment)
    pid = int(launcher.stdout.readline())
    try:
        until(lambda seconds: (tmp_path / "ready").exists() or time.sleep(min(seconds, 0.05)), 60)
        launcher.kill()
        until(lambda seconds: (tmp_path / "SIGTERM").exists() or time.sleep(min(seconds, 0.05)), 10 if ends else 2.5)
        assert (tmp_path / "SIGTERM").exists() == ends
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        launcher.communicate()


@pytest.mark.slow
def test_a_loop_with_a_stage_of_ppo_ends_by_sigterm_at_any_moment(tmp_path):
    """Moments of sampling, of the stage's updates and saving, of evaluations, and between them."""
    loop = {"rounds": 200, "questions": 4, "stages": [{"train": "ppo", "updates": 3}]}
    settings = config_of(tmp_path / "run", 3, {"evaluation": {"questions": 4}, "loop": loop}, save_steps=0)
    for moment in range(12):
        process = start(tmp_path, settings, *(["--resume"] if (tmp_path / "run/config.yaml").exists() else []))
        until(lambda left: list((tmp_path / "run").glob("round-*/sample")) or time.sleep(min(left, 0.05)), 120)
        time.sleep(6 + 0.37 * moment)
        process.send_signal(signal.SIGTERM)
        _, shown = process.communicate(timeout=60)
        told = [line for line in shown.splitlines() if line.startswith("SIGTERM: stopped; the parts of the loop")]
        assert process.returncode == 143 and len(told) == 1 and "Traceback" not in shown, (moment, shown[-2000:])


def test_a_signal_before_a_block_that_may_be_skipped_skips_it():
    done = []
    with Interruptions() as interruptions:
        loop = SimpleNamespace(_interruptions=interruptions)
        with PPOLoop.skippable(loop):
            check()
            done.append("before the signal")
        os.kill(os.getpid(), signal.SIGTERM)
        assert interruptions.asked == signal.SIGTERM
        for _ in range(2):
            with PPOLoop.skippable(loop):
                check()
                done.append("after it")
    assert done == ["before the signal"]


def test_a_signal_drops_what_can_be_done_again_and_a_second_ctrl_c_loses_nothing(capfd):
    with Interruptions() as interruptions:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (interruptions.asked, interruptions.name) == (signal.SIGTERM, "SIGTERM")
        with pytest.raises(Discarded), interruptions.droppable():
            raise AssertionError("a signal has come before")
        os.kill(os.getpid(), signal.SIGINT)
        assert interruptions.asked == signal.SIGTERM and isinstance(interruptions.error, Terminated)
    assert "Ctrl-\\ ends it at once" in capfd.readouterr().err
    with Interruptions() as interruptions:
        with pytest.raises(Discarded), interruptions.droppable():
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except Exception as error:  # what libraries write around their own work
                raise AssertionError("it was swallowed") from error
        os.kill(os.getpid(), signal.SIGINT)  # saving goes on
        interruptions.nothing_to_lose = True
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_no_thread_is_left_to_free_what_a_run_has_loaded():
    model = SimpleNamespace(freed_in=[])
    heard = MethodType(lambda model: None, model)
    with Interruptions(heard):
        before = threading.enumerate()
    assert "hears of signals" in [thread.name for thread in before]
    assert "hears of signals" not in [thread.name for thread in threading.enumerate()]
    del heard, before
    assert sys.getrefcount(model) == 2, "the name `model` and the argument of getrefcount"


def test_a_thread_holds_nothing_of_a_call_whose_result_is_known():
    class Tensor:
        pass

    refs, freed, begin = [], [], threading.Event()

    def compute(tensor):
        refs.append(weakref.ref(tensor))
        begin.wait(10)

    with Threads(1, "computes") as threads:
        future = threads.submit(compute, Tensor())
        future.add_done_callback(lambda _: freed.append(refs[0]() is None))
        begin.set()
        result(future)
    assert freed == [True]


def test_a_signal_that_a_library_swallows_ends_the_next_wait():
    with Interruptions() as interruptions, pytest.raises(Discarded), interruptions.droppable():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            interruptions.swallowed = True
        pause(600)
    assert interruptions.swallowed


def test_the_newest_undamaged_checkpoint_is_used(tmp_path, caplog):
    folder = tmp_path / "run"
    run.train(config_of(folder, updates=3), resume=False, quiet=True)
    newest, older = folder / "checkpoint-3", folder / "checkpoint-2"
    file = newest / "policies/ann/model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert newest_whole(list_checkpoints(folder)) == older
    assert "model.safetensors is missing or damaged" in caplog.text and "going on from an older one" in caplog.text
    (older / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"every checkpoint is damaged \(2 found\)"):
        newest_whole(list_checkpoints(folder))


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_full_disk_is_named_and_older_checkpoints_stay_whole(background, tmp_path):
    """A limit on the size of files replaces a full disk. Writes fail at the same place with the same kind of error."""
    folder = tmp_path / "run"
    config = config_of(folder, updates=200, async_save=background)
    process = start(tmp_path, dataclasses.replace(config, dialogues_logged=0))
    wait_for(folder / "metrics.jsonl", 3, process)
    resource.prlimit(
        process.pid, resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY)
    )  # less than a checkpoint's files
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "no space to write it" in shown and "older ones are whole" in shown and "Traceback" not in shown, shown
    whole = list_checkpoints(folder)
    assert whole and newest_whole(whole) == whole[-1] and not list(folder.glob(".partial-*"))


def begin_killed(tmp_path, config, number, *options):
    """Start a run that is killed just before its ``number``-th change to its folder; whether it was killed."""
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    words = [SUPPORT / "killed_at.py", number, config.output_dir, "train", file, "-q", *options]
    done = processes.run(words)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def go_on(config):
    """Go on with a killed run as a user would, who is told which way: resumed, or started again."""
    try:
        run.train(config, resume=True, quiet=True)
    except CheckpointError as error:
        assert "holds no run to resume; start without --resume" in str(error)
        run.train(config, resume=False, quiet=True)


@pytest.mark.parametrize("number", [8, 12])
def test_a_run_killed_while_it_takes_its_folder_can_be_begun_or_gone_on_with(tmp_path, number):
    """Before its configuration has its name, and before its data are remembered."""
    config = config_of(tmp_path / "run", 1, {"warm_start": {"steps": 0}})
    assert begin_killed(tmp_path, config, number)
    go_on(config)
    assert (tmp_path / "run/final").is_dir()


@pytest.mark.slow
def test_a_run_killed_before_each_change_to_its_folder_ends_as_a_calm_one(tmp_path):
    updates, sections = 2, {"evaluation": {"questions": 4}}
    calm = config_of(tmp_path / "calm", updates, sections)
    run.train(calm, resume=False, quiet=True)
    kills = 0
    for number in range(1, 10_000):
        folder = tmp_path / str(number) / "run"
        folder.parent.mkdir()
        config = config_of(folder, updates, sections)
        if not begin_killed(folder.parent, config, number):
            break
        kills += 1
        go_on(config)
        assert_same_end(end_of(folder, updates), end_of(tmp_path / "calm", updates))
    assert kills > 40
    print(f"{kills} kills")


@pytest.mark.slow
def test_a_resume_from_an_older_checkpoint_killed_before_each_change_can_be_gone_on_with(tmp_path):
    updates, sections = 4, {"evaluation": {"questions": 4}}
    calm = tmp_path / "calm/run"
    run.train(config_of(calm, updates, sections, save_total_limit=9), resume=False, quiet=True)
    kills = 0
    for number in range(1, 10_000):
        folder = tmp_path / str(number) / "run"
        shutil.copytree(calm, folder)
        shutil.rmtree(folder / "final")
        (folder / "checkpoint-4/MANIFEST.json").unlink()
        (folder / "checkpoint-3/policies/bob/model.safetensors").write_bytes(b"")
        config = config_of(folder, updates, sections, save_total_limit=9)
        (folder / "config.yaml").write_text(to_yaml(config))
        if not begin_killed(folder.parent, config, number, "--resume"):
            break
        kills += 1
        go_on(config)
        assert_same_end(end_of(folder, updates), end_of(calm, updates))
        gone = {"checkpoint-3.damaged", "checkpoint-4.damaged", "metrics.jsonl.abandoned", "dialogues.jsonl.abandoned"}
        assert gone <= {path.name for path in folder.iterdir()}
    assert kills > 10
    print(f"{kills} kills")


class Failing:
    """Lets the ``number``-th write to a folder fail with ``code``, and every later one, as a disk that stays full
    does."""

    def __init__(self, folder, number, code):
        self.folder, self.number, self.code, self.seen = str(folder), number, code, 0

    def patched(self, function):
        def failing(path, *arguments, **options):
            reads = function is io.open and set(arguments[0] if arguments else options.get("mode", "r")) <= set("rbt")
            if not reads and str(path).startswith(self.folder):
                self.seen += 1
                if self.seen >= self.number:
                    raise OSError(self.code, os.strerror(self.code), str(path))
            return function(path, *arguments, **options)

        return failing

    def install(self, patch):
        patch.setattr(io, "open", self.patched(io.open))  # what pathlib opens files with
        patch.setattr("builtins.open", self.patched(io.open))
        patch.setattr(trl_ext.learning.checkpoint, "save_file", self.save(trl_ext.learning.checkpoint.save_file))

    def save(self, function):
        check = self.patched(lambda path, *_: None)

        def failing(tensors, path, *arguments):
            check(path)
            return function(tensors, path, *arguments)

        return failing


def fails_and_goes_on(tmp_path, calm, updates, number, code):
    """Whether the run ended with an error, after which it went on as if there had been none."""
    folder = tmp_path / f"{code}-{number}" / "run"
    config = config_of(folder, updates, {"warm_start": {"steps": 0}})
    with pytest.MonkeyPatch.context() as patch:
        Failing(folder, number, code).install(patch)
        try:
            run.train(config, resume=False, quiet=True)
            return False
        except (OSError, CheckpointError) as error:
            assert str(folder) in str(error), f"{error!r} does not name the file"
    begun = (folder / "config.yaml").exists()
    for whole in list_checkpoints(folder):
        verify(whole)
    run.train(config, resume=begun, quiet=True)
    assert_same_end(end_of(folder, updates), calm)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_at_any_write_costs_no_finished_work(tmp_path, code):
    run.train(config_of(tmp_path / "calm", 2, {"warm_start": {"steps": 0}}), resume=False, quiet=True)
    calm, failed = end_of(tmp_path / "calm", 2), 0
    while fails_and_goes_on(tmp_path, calm, 2, failed + 1, code):
        failed += 1
    assert failed > 30
    print(f"{failed} writes")


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, 500, 2_000, 5_000, 10_000, 20_000, 40_000, 60_000, 100_000, 150_000])
def test_a_full_disk_of_any_size_ends_the_run_in_one_line_and_it_goes_on(tmp_path, size):
    """The kernel's limit on the size of a file, from the second update on."""
    folder = tmp_path / "run"
    config = config_of(folder, 60)
    process = start(tmp_path, config)
    wait_for(folder / "metrics.jsonl", 2, process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    _, shown = process.communicate(timeout=300)
    if process.returncode:
        ends = [line for line in shown.splitlines() if not line.startswith("audit: ")]  # told after three updates
        assert process.returncode == 1 and len(ends) == 1 and ends[0].startswith("error: "), shown
        resumed = start(tmp_path, config, "--resume")
        _, shown = resumed.communicate(timeout=300)
        assert resumed.returncode == 0, shown
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [*range(1, 61)]


@pytest.mark.slow
def test_a_clock_that_goes_backwards_changes_nothing(tmp_path, monkeypatch):
    run.train(config_of(tmp_path / "calm", 2), resume=False, quiet=True)
    now = itertools.count(2e9, -3600.0)
    monkeypatch.setattr(time, "time", lambda: next(now))
    folder = tmp_path / "run"
    run.train(config_of(folder, 2), resume=False, quiet=True)
    shutil.rmtree(folder / "final")
    for checkpoint in list_checkpoints(folder):
        os.utime(checkpoint, (0, 2e9 - int(checkpoint.name[-1])))  # the newest has the oldest time
    (folder / "checkpoint-2/state.json").write_text("{}")
    run.train(config_of(folder, 2), resume=True, quiet=True)
    assert_same_end(end_of(folder, 2), end_of(tmp_path / "calm", 2))
