"""Several machines, as Ray's own test cluster has them on one: a run joins them, and one of them is lost in the
middle."""

import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from ray_groups import assert_equal
from tiny_runs import config_of, end_of

from maporl.errors import ConfigError
from maporl.integrations.ray import ray_cluster
from maporl.integrations.ray.doctor import examine_cluster
from maporl.integrations.ray.group import GroupFailed
from maporl.runs import train as run
from maporl.runs.build import build_trainer
from trl_ext.files.checkpoints import list_checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")]
EVALUATION = {"evaluation": {"questions": 8}}


@pytest.fixture
def machines():
    """Start machines with a number of places each, beside a head without any.

    They listen on loopback, and have a token.
    """
    ray_cluster._make_safe()
    ray_cluster.os.environ["RAY_AUTH_TOKEN_PATH"] = str(ray_cluster._own_folder() / "token")
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "object_store_memory": 2**28}
    cluster = Cluster(initialize_head=True, head_node_args=options | {"include_dashboard": False})

    def add(places):
        return cluster.add_node(resources={"maporl_place": places}, **options)

    cluster.add = add
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """What a run of three updates leaves without Ray."""
    folder = tmp_path_factory.mktemp("local") / "run"
    run.train(config_of(folder, 3, EVALUATION), resume=False, quiet=True)
    return end_of(folder, 3)


def joined(folder, cluster, places=4, **options):
    section = {"backend": "ray", "address": cluster.address, "devices": {"cpu": places}, **options}
    return config_of(folder, 3, EVALUATION | {"cluster": section})


def lose(trainer, cluster, node):
    """Kill a machine in the background, as soon as there is a checkpoint. Return the thread and when it happened."""
    when = []

    def work():
        while not list_checkpoints(Path(trainer.args.output_dir)):
            time.sleep(0.01)
        when.append(time.monotonic())
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, when


def test_a_run_goes_on_where_places_are_free_when_a_machine_is_lost(machines, local, tmp_path):
    """Both learners are on the machine that is lost.

    Their snapshots are not; the end is that of a calm run, to the bit.
    """
    first, _ = machines.add(2), machines.add(4)
    trainer = build_trainer(joined(tmp_path / "run", machines), quiet=True)
    backend = trainer.home
    try:
        used = backend.places._machines
        assert used[0] == used[2] == [first.node_id] and first.node_id not in used[1] + used[3]
        thread, _ = lose(trainer, machines, first)
        trainer.train()
        thread.join()
        assert all(group.restarts >= 1 for group in backend.learner_groups.values())
        assert not any(first.node_id in own for own in used.values())
    finally:
        backend.end()
    assert_equal(end_of(tmp_path / "run", 3), local)


@pytest.mark.parametrize("lost", ["learners", "engines"])
def test_a_run_without_free_places_ends_with_its_newest_checkpoint(lost, machines, local, tmp_path):
    nodes = {node.node_id: node for node in (machines.add(2), machines.add(2))}
    folder = tmp_path / "run"
    trainer = build_trainer(joined(folder, machines), quiet=True)
    try:
        used = trainer.home.places._machines  # blocks 0 and 2 are ann and bob to train, and 1 and 3 to sample
        assert used[0] == used[2] != used[1] == used[3]
        thread, when = lose(trainer, machines, nodes[used[0 if lost == "learners" else 1][0]])
        with pytest.raises(GroupFailed, match=r"no machine has free devices .*; resume from .*checkpoint-[123]$"):
            trainer.train()
        assert time.monotonic() - when[0] < 60
        thread.join()
    finally:
        trainer.home.end()
    run.train(config_of(folder, 3, EVALUATION), resume=True, quiet=True)
    assert_equal(end_of(folder, 3), local)


def test_machines_are_asked_before_anything_starts(machines, tmp_path, monkeypatch):
    """Every machine really says what it is. Too few places, and a machine with other code, are refused."""
    machines.add(2), machines.add(1)
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"cluster\.devices: expected 4 places on CPUs, and Ray has 3"):
        build_trainer(joined(folder, machines), quiet=True)
    whole = {"policies": ["ann", "bob"], "learner": {"devices": 3}, "sharing": "turns"}
    with pytest.raises(ConfigError, match=r"asks for 3 devices on one machine \(learner\.node: one\), .*: 2"):
        build_trainer(joined(folder, machines, places=3, groups={"a": whole}), quiet=True)
    asked = []
    facts = ray_cluster.Cluster.facts
    monkeypatch.setattr(ray_cluster.Cluster, "facts", lambda *own: asked.append(facts(*own)) or asked[-1])
    monkeypatch.setattr(
        "maporl.integrations.ray.joining.code_digest", lambda: "another"
    )  # here, and not on the machines
    with pytest.raises(ConfigError, match=r"machine 127\.0\.0\.1 .* has other code .*here another\) of the same"):
        build_trainer(joined(folder, machines), quiet=True)
    assert len(asked[0]) == 3 and all(abs(there.clock - told) < 5 for there, told in asked[0].values())
    assert {there.shared_memory for there, _ in asked[0].values()} == {2**28}
    assert not (folder / "logs").exists()


def test_doctor_asks_every_machine_of_a_cluster(machines, monkeypatch):
    machines.add(2), machines.add(1)
    found = examine_cluster(machines.address)
    assert [finding.state for finding in found] == ["fine"] * 3
    assert sorted(finding.detail for finding in found) == [
        "1 CPU, 0.2 GiB for Ray's objects",
        "1 CPU, 1 maporl_place, 0.2 GiB for Ray's objects",
        "1 CPU, 2 maporl_place, 0.2 GiB for Ray's objects",
    ]
    monkeypatch.setattr(
        "maporl.integrations.ray.joining.code_digest", lambda: "another"
    )  # here, and not on the machines
    other = examine_cluster(machines.address)
    assert {finding.state for finding in other} == {"missing"} and "has other code" in other[0].detail
    [gone] = examine_cluster("127.0.0.1:1")
    assert gone.state == "missing" and gone.what == "cluster 127.0.0.1:1"
