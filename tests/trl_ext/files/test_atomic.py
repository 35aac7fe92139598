"""Files and folders are there whole or not at all."""

import errno
import os

import pytest

from trl_ext.files.atomic import NoSpace, new_folder, replace_file


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path):
    file = tmp_path / "a.json"
    replace_file(file, "é\n")
    replace_file(file, "2")
    assert file.read_bytes() == b"2" and names(tmp_path) == ["a.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    replace_file(file, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(file, "new \ud800")

    def full(handle):
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        replace_file(file, "new")
    assert file.read_text() == "old" and names(tmp_path) == ["a.json"]
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "nowhere" / "a.json", "new")


def test_a_folder_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "final"
    left = tmp_path / ".partial-final" / "half"  # of a process that was killed
    left.mkdir(parents=True)
    with new_folder(target) as partial:
        assert names(partial) == [] and not target.exists()
        (partial / "ann").mkdir()
        (partial / "ann" / "weights").write_text("1")
        with new_folder(target, main=False) as same:  # another process that takes part
            assert same == partial
        assert not target.exists()
    assert names(tmp_path) == ["final", "final/ann", "final/ann/weights"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_folder_that_is_not_completed_is_removed(tmp_path, error):
    def write():
        with new_folder(tmp_path / "final") as partial:
            (partial / "weights").write_text("1")
            raise error

    with pytest.raises(error):
        write()
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [
    OSError(errno.ENOSPC, "x"),
    OSError(errno.EDQUOT, "x"),
    RuntimeError(f"I/O error: {os.strerror(errno.ENOSPC)} (28)"),
])  # fmt: skip
def test_a_full_disk_is_named_in_one_line(tmp_path, error):
    def write():
        with new_folder(tmp_path / "final"):
            raise error

    with pytest.raises(NoSpace, match=r"final: no space to write it .* it was removed\. Free some space"):
        write()
    assert names(tmp_path) == []


def test_an_empty_folder_is_taken_and_a_full_one_is_left_alone(tmp_path):
    target = tmp_path / "final"
    target.mkdir()
    with new_folder(target) as partial:
        (partial / "weights").write_text("1")
    with pytest.raises(OSError), new_folder(target) as partial:
        (partial / "weights").write_text("2")
    assert (target / "weights").read_text() == "1" and names(tmp_path) == ["final", "final/weights"]
