"""Where processes are: the plan of a configuration, machines that are made up, and devices that processes share in
turns."""

import itertools
import random
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray_groups import (
    Engine,
    Learner,
    Thread,
    check_cluster,
    config_of,
    learners_of,
    newest_ray,  # noqa: F401  # a fixture
    pool_of,
    row,
    spec,
)

from maporl.errors import ConfigError
from maporl.integrations.ray import ray_places
from maporl.integrations.ray.engine_pool import EnginePool
from maporl.integrations.ray.group import GroupFailed, LearnerGroup
from maporl.integrations.ray.groups import (
    Block,
    Machine,
    Place,
    Plan,
    belongs,
    check_fits,
    groups_of,
    lay,
    plan_of,
    trained_policies,
)
from maporl.integrations.ray.member import NoPlace
from maporl.integrations.ray.ray_places import CPU, GPU, PLACE, Places, kind_of
from maporl.integrations.ray.scheduling import Turns
from maporl.integrations.ray.section import CountedPlaces, FailuresSection, PoolSection
from maporl.run import ResolvedRun

POOLS = {"fast": PoolSection(accelerator="H100"), "cheap": PoolSection(resource="cheap")}


def plan(groups, **agents):
    agents = agents or {"ann": {"tiny": {}}, "bob": {"tiny": {}}}
    config = config_of(agents, cluster={"backend": "ray", "groups": groups})
    return plan_of(groups_of(config), trained_policies(config))


def test_each_process_has_a_device_of_its_own():
    found = plan(
        {
            "a": {"policies": ["ann"], "learner": {"devices": 2, "node": "any"}, "engines": {"replicas": 2}},
            "b": {"policies": ["bob"]},
        },
        ann={"tiny": {}},
        bob={"tiny": {}, "trainable": False},
    )
    assert found.blocks == [
        Block("a to train", 2, one=False), Block("a to sample", 1), Block("a to sample", 1), Block("b to sample", 1)
    ]  # fmt: skip
    assert found.places == {
        ("a", "learner"): [Place(0, 0), Place(0, 1)],
        ("a", "engine"): [Place(1, 0), Place(2, 0)],
        ("b", "engine"): [Place(3, 0)],
    }
    assert found.said() == "a to train 2, a to sample 1, a to sample 1, b to sample 1"
    assert found.sharers(Place(0, 1)) == 1


def test_groups_that_take_turns_are_on_the_same_devices():
    """Two devices on one machine for ann's learner, and a third anywhere, because bob has three engines."""
    found = plan(
        {
            "a": {"policies": ["ann"], "learner": {"devices": 2}, "sharing": "turns"},
            "b": {"policies": ["bob"], "engines": {"replicas": 3}, "sharing": "turns"},
        }
    )
    assert found.blocks == [Block("a and b in turns", 2, one=True), Block("a and b in turns", 1)]
    devices = [Place(0, 0), Place(0, 1), Place(1, 0)]
    assert found.places == {
        ("a", "learner"): devices[:2],
        ("a", "engine"): devices[:1],
        ("b", "learner"): devices[:1],
        ("b", "engine"): [*devices[1:], devices[0]],
    }
    assert [found.sharers(device) for device in devices] == [4, 2, 1]


@pytest.mark.parametrize("seed", range(50))
def test_what_is_laid_fits_and_what_is_not_laid_cannot_be(seed):
    rng = random.Random(seed)
    kinds = [
        frozenset(),
        frozenset({"cheap"}),
        frozenset({"accelerator_type:H100"}),
        frozenset({"cheap", "accelerator_type:H100"}),
    ]
    table = [Machine(str(n), str(n), rng.randint(0, 4), rng.choice(kinds)) for n in range(3)]
    blocks = [
        Block(str(n), rng.randint(1, 3), rng.choice([None, "fast", "cheap"]), rng.random() < 0.5)
        for n in range(rng.randint(1, 4))
    ]

    def right(places):
        taken = [machine for own in places for machine in own]
        return all(taken.count(machine.id) <= machine.devices for machine in table) and all(
            len(own) == block.devices
            and (len(set(own)) == 1 or not block.one)
            and all(belongs(table[int(machine)], POOLS.get(block.pool)) for machine in own)
            for own, block in zip(places, blocks, strict=True)
        )

    found = lay(blocks, POOLS, table)
    if found is not None:
        assert right(found)
        return
    ways = [
        [[m] * block.devices for m in "012"]
        if block.one
        else map(list, itertools.combinations_with_replacement("012", block.devices))
        for block in blocks
    ]
    assert not any(right(places) for places in itertools.product(*map(list, ways)))


@pytest.mark.parametrize(
    "blocks, message",
    [
        (
            [Block("a to train", 4, one=True), Block("b to train", 3)],
            r"ask for 7 devices \(a to train 4, b to train 3\), and Ray has 6 \(m0: 4, m1: 2\); lower learner\.devices",
        ),
        (
            [Block("a to train", 1), Block("a to sample", 3, "fast")],
            r"ask for 3 devices in pool fast \(accelerator H100\) \(a to sample 3\), and Ray has 2 \(m1: 2\)",
        ),
        (
            [Block("a to train", 5, one=True)],
            r"5 devices on one machine \(learner\.node: one\), and Ray has m0: 4, m1: 2; set learner\.node: any",
        ),
        (
            [Block("a to train", 3, one=True), Block("b to train", 3, one=True)],
            r"a to train 3, b to train 3, which fits the machines one by one and not all together: Ray has m0: 4, m1: 2",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_sum(blocks, message):
    table = [Machine("0", "m0", 4), Machine("1", "m1", 2, frozenset({"accelerator_type:H100"}))]
    with pytest.raises(ConfigError, match=message):
        check_fits(Plan(blocks), {"fast": POOLS["fast"]}, table)
    check_fits(Plan([Block("a to train", 4, one=True), Block("b to train", 2, "fast")]), {"fast": POOLS["fast"]}, table)


def test_a_pool_without_machines_is_named():
    with pytest.raises(ConfigError, match=r"in pool cheap \(resource cheap\) .*and Ray has 0 \(no such machine\)"):
        check_fits(Plan([Block("a to train", 1, "cheap", one=True)]), POOLS, [Machine("0", "m0", 4)])


TURNS = {"policies": ["ann", "bob"], "sharing": "turns"}


@pytest.mark.parametrize(
    "cluster, message",
    [
        ({"groups": {"a": {**TURNS, "sharing": "sleep"}}}, "a.sharing: the engine transformers has no sleep; use engine: vllm, or turns"),
        (
            {"groups": {"a": {**TURNS, "learner": {"pool": "x"}}}, "pools": {"x": {"accelerator": "H100"}}},
            "learner.pool is 'x' where engines.pool is None; give both the same pool",
        ),
        ({"groups": {"a": {"policies": ["ann", "bob"], "engines": {"pool": "x"}}}}, "a.engines.pool: no pool 'x'; cluster.pools has: none"),
        ({"pools": {"x": {"accelerator": "H100"}}}, "cluster.pools.x: no group uses it"),
        ({"devices": {"cpu": 3}}, "ask for 4 places (ann to train 1, ann to sample 1, bob to train 1, bob to sample 1), and cluster.devices has 3"),
        ({"backend": "local", "pools": {"x": {"resource": "y"}}}, "cluster.pools: backend is local, which has none"),
        ({"backend": "local", "devices": {"cpu": 3}}, "cluster.devices: backend is local, which has none"),
        ({"pools": {"x": {"resource": "y", "accelerator": "z"}}}, "cluster.pools.x: give either accelerator"),
    ],
)  # fmt: skip
def test_places_that_cannot_be_are_refused_before_ray_starts(cluster, message):
    with pytest.raises(ConfigError) as caught:
        check_cluster(
            ResolvedRun(config_of({"ann": {"tiny": {}}, "bob": {"tiny": {}}}, cluster={"backend": "ray", **cluster}))
        )
    assert message in str(caught.value)


def test_turns_need_fewer_places():
    turns = {"groups": {"a": TURNS}, "devices": {"cpu": 1}}
    assert check_cluster(
        ResolvedRun(config_of({"ann": {"tiny": {}}, "bob": {"tiny": {}}}, cluster={"backend": "ray", **turns}))
    ) == ["group a: ann, bob; 1 to train (replicated), 1 to sample, in turns"]


def test_what_processes_are_placed_on():
    assert kind_of("auto", False, {"GPU": 2.0}) == GPU
    assert kind_of("auto", True, {"GPU": 2.0}) == kind_of("auto", False, {"CPU": 2.0}) == CPU
    assert kind_of(CountedPlaces(cpu=2), False, {"GPU": 2.0, "maporl_place": 3.0}) == PLACE
    with pytest.raises(ConfigError, match=r"expected 2 places on CPUs, and Ray has 1; .*: ray start"):
        kind_of(CountedPlaces(cpu=2), False, {"maporl_place": 1.0})


# -- Ray, made up ------------------------------------------------------------------------------------------------------


class MadeUpRay:
    """Machines with GPUs that can be lost, and placement groups that are made if their devices are free."""

    def __init__(self, **devices):
        self.alive, self.groups = dict(devices), []
        self._private = SimpleNamespace(state=SimpleNamespace(available_resources_per_node=self.free))
        strategy = SimpleNamespace(
            PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: (
                group,
                placement_group_bundle_index,
            )
        )
        self.util = SimpleNamespace(
            placement_group=self.make, remove_placement_group=self.groups.remove, scheduling_strategies=strategy
        )

    def nodes(self):
        return [
            {"NodeID": name, "NodeManagerAddress": "host", "Alive": True, "Resources": {"GPU": float(count)}}
            for name, count in self.alive.items()
        ]

    def free(self):
        taken = [machine for group in self.groups for machine in group.machines]
        return {name: {"GPU": float(count - taken.count(name))} for name, count in self.alive.items()}

    def make(self, bundles, strategy, bundle_label_selector):
        machines = [own["ray.io/node-id"] for own in bundle_label_selector]
        assert bundles == [{"GPU": 1.0}] * len(machines) and (strategy == "PACK" or len(set(machines)) == 1)
        group = SimpleNamespace(machines=machines, wait=lambda seconds: self.free()[machines[0]]["GPU"] >= 0)
        self.groups.append(group)
        return group


def test_a_block_whose_machine_is_lost_is_laid_on_another_or_refused(monkeypatch):
    monkeypatch.setattr(ray_places, "PATIENCE", 0.0)
    monkeypatch.setattr(ray_places.time, "sleep", lambda seconds: None)
    ray = MadeUpRay(one=2, two=2, three=2)
    plan = Plan(
        [Block("ann to train", 2, one=True), Block("ann to sample", 1)], {"x": [Place(0, 1), Place(1, 0), Place(1, 0)]}
    )
    places = Places(ray, plan, {}, GPU)
    places.take()
    learner, engine = ray.groups
    assert (learner.machines, engine.machines) == (["one", "one"], ["two"])
    assert places.options(Place(0, 1)) == {"num_cpus": 0, "num_gpus": 1.0, "scheduling_strategy": (learner, 1)}
    assert places.options(Place(1, 0)) == {"num_cpus": 0, "num_gpus": 0.5, "scheduling_strategy": (engine, 0)}
    del ray.alive["one"]
    group, device = places.options(Place(0, 1))["scheduling_strategy"]
    assert device == 1 and group.machines == ["three", "three"] and ray.groups == [engine, group]
    del ray.alive["two"]
    expected = r"no machine has free devices for it: asked for ann to sample 1; free: host \(node three\): 0"
    with pytest.raises(NoPlace, match=expected):
        places.options(Place(1, 0))


def test_devices_that_others_use_are_named(monkeypatch):
    monkeypatch.setattr(ray_places, "PATIENCE", 0.0)
    monkeypatch.setattr(ray_places.time, "sleep", lambda seconds: None)
    ray = MadeUpRay(one=2)
    ray.groups.append(SimpleNamespace(machines=["one"]))
    with pytest.raises(ConfigError, match=r"ann to train 2; free: host \(node one\): 1; wait until others"):
        Places(ray, Plan([Block("ann to train", 2)]), {}, GPU).take()


# -- turns -------------------------------------------------------------------------------------------------------------


def test_who_asks_first_is_first_and_nobody_holds_what_it_does_not_use():
    turns = Turns()
    first, both, second = turns.ask([0]), turns.ask([0, 1]), turns.ask([1])
    assert [own.done() for own in (first, both, second)] == [True, False, False]
    turns.give([0])
    both.result(timeout=5)
    assert not second.done()
    turns.give([0, 1])
    second.result(timeout=5)


def test_an_error_gives_the_devices_back():
    turns = Turns()

    def fail():
        raise ValueError("no such method")

    broken: Future = Future()
    broken.set_exception(ValueError("it failed"))
    with pytest.raises(ValueError, match="no such method"):
        turns.run([0], fail).result(timeout=5)
    with pytest.raises(ValueError, match="it failed"):
        turns.run([0], lambda: broken).result(timeout=5)
    assert turns.ask([0]).done()


class Watched:
    """A part whose calls note who else is working on the same device."""

    def __init__(self, part, device, working, clashes):
        self.part, self.device, self.working, self.clashes = part, device, working, clashes

    def __getattr__(self, name):
        method = getattr(self.part, name)

        def call(*arguments):
            if self.working.setdefault(self.device, []):
                self.clashes.append((self.device, name))
            self.working[self.device].append(name)
            time.sleep(0.0005)
            found = method(*arguments)
            self.working[self.device].remove(name)
            return found

        return call


def shared_groups(tmp_path, turns, working, clashes):
    """Two groups of two learners and two engines over two devices, of which each has four processes."""

    def thread(name, part, device):
        member = Thread(name, Watched(part, device, working, clashes))
        member.place = device if turns is not None else name
        return member

    groups, pools = [], []
    for name in ("ann", "bob"):
        world = {"updates": [], "deaths": (), "hangs": (), "members": []}
        start = lambda rank, n=name, w=world: thread(f"{n} learner {rank}", Learner(w, rank), rank)  # noqa: E731
        groups.append(LearnerGroup(spec(), start, FailuresSection(), tmp_path, turns=turns))
        begin = lambda number, place, n=name: thread(f"{n} engine {number}", Engine((0.001, 0.0)), place)  # noqa: E731
        pools.append(EnginePool(spec(), begin, FailuresSection(), tmp_path, turns=turns))
    return groups, pools


def play(groups, pools):
    """Learn in both groups at the same time, while both sample; return what they answer and what they learn."""
    found = {}

    def learn(number):
        groups[number].build()
        for update in range(1, 6):
            groups[number].annotate([("a",), ("b",)])
            found[number, update] = groups[number].update([(update,), (update,)])

    def sample(number):
        pools[number].build()
        for version in range(1, 6):
            pools[number].load("ann", version, f"weights {version}")
            answers = pools[number].ask([row(n) for n in range(6)])
            found[f"answers {number} {version}"] = [answer.result(timeout=20).ids for answer in answers]

    threads = [threading.Thread(target=work, args=(n,)) for work in (learn, sample) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    return found


def test_no_two_processes_of_a_device_work_at_once_in_turns(tmp_path):
    """The same calls without turns do clash, so the watching works; and what they answer is the same."""
    clashes: list = []
    expected = play(*shared_groups(tmp_path, None, {}, clashes))
    assert clashes and expected[0, 5] == 15 and expected["answers 1 5"] == [[n, 5] for n in range(6)]
    clashes.clear()
    assert play(*shared_groups(tmp_path, Turns(), {}, clashes)) == expected
    assert clashes == []


# -- places that are lost ----------------------------------------------------------------------------------------------


def test_a_pool_goes_on_with_fewer_processes_if_a_place_is_lost(tmp_path, caplog):
    pool, started = pool_of(tmp_path, places=2)
    started[0].end()
    answers = pool.ask([row(number) for number in range(8)])
    assert [answer.result(timeout=20).ids for answer in answers] == [[n, 0] for n in range(8)]
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2/MANIFEST.json").write_text("{}")
    started[1].end()
    with pytest.raises(GroupFailed, match=r"'ann': no machine has free devices.*; resume from .*checkpoint-2"):
        pool.ask([row(0)])[0].result(timeout=20)
    assert "it goes on with 1 engines of 2" in caplog.text
    with pytest.raises(GroupFailed, match="no machine has free devices"):
        pool.ask([row(0)])[0].result(timeout=20)


def test_a_group_whose_place_is_lost_ends_the_run_with_the_newest_checkpoint(tmp_path):
    group, _ = learners_of(tmp_path, deaths=(1,), places=2)
    group.annotate([("a",), ("b",)])
    with pytest.raises(
        GroupFailed, match=r"'ann': no machine has free devices .*checkpoint yet \(training\.save_steps\)"
    ):
        group.update([(1,), (1,)])
    with pytest.raises(GroupFailed, match="its processes have ended"):
        group.all("has_central")
