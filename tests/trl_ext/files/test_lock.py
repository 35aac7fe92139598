"""One run at a time in a folder. A killed process leaves no lock behind."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from trl_ext.files.lock import LOCK, OWNER, FolderInUse, RunLock, UnwritableFolder, holds_something

HOLD = """
import sys
from pathlib import Path
from trl_ext.files.lock import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of ``tmp_path / "run"``."""
    words = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_told_who_trains_and_a_killed_one_leaves_the_folder_free(tmp_path, holder, caplog):
    folder = tmp_path / "run"
    with pytest.raises(FolderInUse, match=rf"run: process {holder.pid} on {socket.gethostname()} \(since 20.*writes"):
        RunLock(folder).acquire()
    for text in ("{", "[]", "{}", json.dumps({"pid": 1, "host": "\x1b[2J", "since": ""})):
        (folder / OWNER).write_text(text)  # the name is for people, and the lock is the system's
        with pytest.raises(FolderInUse, match="run: another process writes here"):
            RunLock(folder).acquire()
    holder.kill()
    holder.wait()
    with RunLock(folder):
        assert json.loads((folder / OWNER).read_text())["pid"] == os.getpid()
    assert not (folder / OWNER).exists() and not holds_something(folder) and not caplog.records


def test_an_aliased_path_is_the_same_folder(tmp_path, holder):
    (tmp_path / "link").symlink_to("run")
    with pytest.raises(FolderInUse):
        RunLock(tmp_path / "link").acquire()
    with pytest.raises(FolderInUse):
        RunLock(tmp_path / "run" / ".." / "run").acquire()


def test_a_thread_may_take_it_again_and_another_thread_may_not(tmp_path):
    folder, refused = tmp_path / "run", []

    def other():
        try:
            RunLock(folder).acquire()
        except FolderInUse as error:
            refused.append(str(error))

    with RunLock(folder):
        with RunLock(folder):
            pass
        assert (folder / OWNER).exists(), "the outer block still has it"
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert len(refused) == 1 and f"process {os.getpid()} on" in refused[0]
    RunLock(folder).release()  # nothing to give back
    with RunLock(folder):
        pass


def test_a_run_of_another_host_that_did_not_end_in_order_is_named(tmp_path, caplog):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / OWNER).write_text(json.dumps({"pid": 77, "host": "elsewhere", "since": "yesterday"}))
    with RunLock(folder):
        assert "process 77 on elsewhere (since yesterday) wrote here last and did not end in order" in caplog.text
    caplog.clear()
    with RunLock(folder):
        assert not caplog.records


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError("no flock")])
def test_a_file_system_without_locks_is_said_and_the_run_goes_on(tmp_path, monkeypatch, caplog, error):
    def acquire(self, *_, **__):
        raise error

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with RunLock(tmp_path / "run"):
        assert "its file system has no locks" in caplog.text and "no other process writes here" in caplog.text


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path, monkeypatch):
    def acquire(self, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "the folder")

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with pytest.raises(UnwritableFolder, match=r"run: cannot be written \(Permission denied\); change its permissions"):
        RunLock(tmp_path / "run").acquire()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        RunLock(tmp_path / "file").acquire()


def test_a_lock_that_is_a_link_leaves_the_linked_file_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "mine")
    with pytest.raises(UnwritableFolder, match=r"\.lock: is a link"):
        RunLock(tmp_path / "run").acquire()
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_full_disk_at_the_lock_leaves_it_free(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("trl_ext.files.lock.replace_file", full)
        with pytest.raises(OSError, match="No space"):
            RunLock(tmp_path / "run").acquire()
    test_a_thread_may_take_it_again_and_another_thread_may_not(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two other users")
def test_another_user_who_may_write_the_folder_may_resume_its_run(tmp_path):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o777)
    code = HOLD.replace("sys.stdin.read()", "").replace("RunLock(", "import os; os.setuid(int(sys.argv[2])); RunLock(")
    for user in ("65534", "65533"):
        done = subprocess.run([sys.executable, "-c", code, folder, user], capture_output=True, text=True)
        assert done.stdout == "held\n", done.stderr
    shutil.rmtree(folder)
