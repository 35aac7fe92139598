"""What machines of a cluster must have in common, with facts that are made up; and the facts of this machine."""

import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from maporl.errors import ConfigError
from maporl.integrations.ray import joining
from maporl.integrations.ray.joining import (
    Facts,
    check_facts,
    check_shared_memory,
    code_digest,
    facts_here,
    free_shared_memory,
    marked,
)
from maporl.integrations.ray.ray_cluster import check_reached

VERSIONS = {"Python": "3.11.9", "maporl": "0.1.0", "ray": "2.60.0", "torch": "2.13.0"}
HERE = Facts(VERSIONS, "0123456789ab", 1000.0, None, None)
THERE = Facts(VERSIONS, "0123456789ab", 1000.0, 8 * 10**9, "mark")


def check(there, told=1000.0):
    machines = {"10.0.0.1 (node a)": (THERE, 1000.0), "10.0.0.2 (node b)": (there, told)}
    return check_facts(HERE, machines, "mark", Path("runs/x"), 3 * 10**9)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"versions": VERSIONS | {"Python": "3.12.1"}}, r"has Python 3\.12\.1, and this one has 3\.11\.9; install the same"),
        ({"versions": VERSIONS | {"ray": "2.61.0"}}, r"has ray 2\.61\.0, and this one has 2\.60\.0"),
        ({"versions": VERSIONS | {"torch": "none"}}, r"has torch none, and this one has 2\.13\.0"),
        ({"versions": VERSIONS | {"maporl": "0.2.0"}}, r"has maporl 0\.2\.0, and this one has 0\.1\.0"),
        ({"code": "ffff"}, r"has other code of maporl and trl_ext \(digest ffff, here 0123456789ab\) of the same version 0\.1\.0"),
        ({"mark": None}, r"does not see this machine's folder runs/x; put output_dir on storage that all machines share"),
        ({"mark": "of another folder"}, r"does not see this machine's folder runs/x"),
        ({"shared_memory": 10**9}, r"has 1\.00 GB of shared memory for Ray's objects, and the largest .* take 3\.00 GB; enlarge /dev/shm"),
    ],
)  # fmt: skip
def test_a_machine_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ConfigError, match=r"cluster: machine 10\.0\.0\.2 \(node b\) " + message):
        check(replace(THERE, **changes))


def test_clocks_that_differ_are_told():
    assert check(replace(THERE, clock=1004.0)) == check(THERE, 1004.9) == []
    ahead = check(replace(THERE, clock=1007.0))
    assert ahead == [
        "warning: the clock of machine 10.0.0.2 (node b) is 7 s ahead of this one's; times in logs will not agree; "
        "use NTP"
    ]
    assert "is 9 s behind this one's" in check(THERE, 1009.0)[0]


def test_a_machine_tells_what_it_is(tmp_path):
    with marked(tmp_path / "run") as mark:
        found = facts_here(str(tmp_path / "run"))
        assert found.mark == mark and len(mark) == 16
        assert facts_here(str(tmp_path / "elsewhere")).mark is None
    assert list((tmp_path / "run").iterdir()) == []
    assert set(found.versions) == set(VERSIONS) and found.code == code_digest() and abs(found.clock - time.time()) < 60
    check_shared_memory(None, 10**18, "cluster: this machine")
    if (free := free_shared_memory()) is not None:
        with pytest.raises(ConfigError, match="cluster: this machine has"):
            check_shared_memory(free, free + 1, "cluster: this machine")


def test_the_digest_is_that_of_the_code(tmp_path, monkeypatch):
    """Another byte or another name of a file is another digest; other files do not count."""
    monkeypatch.setattr(joining, "PACKAGES", ("own",))
    monkeypatch.setattr(
        joining, "find_spec", lambda name: type("Spec", (), {"submodule_search_locations": [tmp_path / name]})
    )
    (tmp_path / "own").mkdir()
    file = tmp_path / "own/a.py"
    file.write_text("x = 1\n")
    first = code_digest()
    (tmp_path / "own/notes.txt").write_text("no code")
    assert code_digest() == first
    file.write_text("x = 2\n")
    assert code_digest() != first
    file.write_text("x = 1\n")
    assert code_digest() == first
    shutil.move(file, tmp_path / "own/b.py")
    assert code_digest() != first


def test_a_cluster_that_is_not_there_is_refused_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"nothing answers at 127\.0\.0\.1:{port} .*--head --port={port}"):
            check_reached(f"127.0.0.1:{port}")
        taken.listen()
        check_reached(f"127.0.0.1:{port}")
    for address in ("localhost", "127.0.0.1:", ":6379", "ray://head:x"):
        with pytest.raises(ConfigError, match="expected HOST:PORT or auto"):
            check_reached(address)
