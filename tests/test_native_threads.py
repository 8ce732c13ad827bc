"""The native engine's threads: together, after failures, after fork, and how many there are."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from smollm2 import _native
from smollm2.backends import native
from tests.backend_rules import CONFIG, IDS, WEIGHTS, full, spans

COUNTS = [1, 2, 3, 8]


@pytest.fixture(autouse=True)
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many threads as are asked for, also where there are fewer CPUs."""
    monkeypatch.setattr(native, "_cpus", lambda: 256)


@pytest.mark.parametrize("count", COUNTS)
def test_each_worker_runs_once_and_the_caller_is_the_first(count: int) -> None:
    team = _native.Threads(count)
    assert team.count == count
    for _ in range(50):
        seen: dict[int, int] = {}
        team.run(lambda worker, seen=seen: seen.update({worker: threading.get_native_id()}))
        assert sorted(seen) == list(range(count))
        assert len(set(seen.values())) == count
        assert seen[0] == threading.get_native_id()


def test_there_is_at_least_one_worker() -> None:
    assert _native.Threads(0).count == 1
    assert _native.Threads(-3).count == 1


@pytest.mark.parametrize("count", COUNTS)
def test_no_phase_begins_before_the_last_is_through(count: int) -> None:
    team = _native.Threads(count)
    lock = threading.Lock()
    for _ in range(3):
        inside = [0] * 200
        came = [0] * 200
        wrong: list[int] = []

        def work(worker: int, phase: int, *, inside=inside, came=came, wrong=wrong) -> None:
            with lock:
                inside[phase] += 1
                came[phase] += 1
                if any(inside[:phase]) or any(came[phase + 1 :]) or not all(came[:phase]):
                    wrong.append(phase)
            if worker == phase % count and phase % 40 == 0:
                time.sleep(2e-3)  # longer than anyone spins
            with lock:
                inside[phase] -= 1

        team.run_phases(200, work)
        assert wrong == []
        assert all(1 <= number <= count for number in came)


@pytest.mark.parametrize("count", COUNTS)
def test_what_a_worker_throws_reaches_the_caller(count: int) -> None:
    """Nothing is begun after it, and the team works on afterwards."""
    team = _native.Threads(count)
    phases: list[int] = []

    def broken(worker: int, phase: int) -> None:
        phases.append(phase)
        if phase == 5:
            raise LookupError(f"worker {worker}")

    for _ in range(20):
        with pytest.raises(LookupError, match="worker"):
            team.run_phases(10, broken)
        assert max(phases) == 5
        done: list[int] = []
        team.run(done.append)
        assert sorted(done) == list(range(count))


def test_when_all_throw_one_is_reported() -> None:
    team = _native.Threads(4)

    def broken(worker: int) -> None:
        raise LookupError(worker)

    for _ in range(20):
        with pytest.raises(LookupError):
            team.run(broken)


def test_idle_workers_sleep() -> None:
    """cases: P rows; a loaded model that does nothing takes no time."""
    team = _native.Threads(4)
    team.run(lambda _: None)
    time.sleep(0.05)
    started = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - started < 0.03


def test_a_worker_waiting_for_long_sleeps() -> None:
    team = _native.Threads(2)

    def work(worker: int, phase: int) -> None:
        if worker == phase == 0:
            time.sleep(0.3)

    started = time.process_time()
    team.run_phases(2, work)
    assert time.process_time() - started < 0.05


def in_child(work: Callable[[], bool]) -> bool:
    """Whether ``work()`` holds in a forked child that has 60 seconds."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    for _ in range(6000):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@needs_fork
def test_a_forked_child_has_its_own_threads() -> None:
    """cases: a model loaded before multiprocessing forks; it works in parent and child."""
    model = native.backend.load(CONFIG, WEIGHTS, quant="q8", threads=3)
    cache = model.new_cache(1, 64)
    from smollm2.batch import Span

    model.forward(spans(cache, Span(0, 0, IDS[:20])), cache)
    expected = full(model, IDS)

    def child() -> bool:
        same = np.array_equal(full(model, IDS), expected)
        model.forward(spans(cache, Span(0, 20, IDS[20:30])), cache)
        return (
            same
            and cache.lengths == (30,)
            and in_child(lambda: np.array_equal(full(model, IDS), expected))
        )

    assert in_child(child)
    assert in_child(child)
    np.testing.assert_array_equal(full(model, IDS), expected)
    assert cache.lengths == (20,)


@needs_fork
def test_a_child_forked_in_the_middle_of_a_forward_is_not_stuck() -> None:
    model = native.backend.load(CONFIG, WEIGHTS, quant="q8", threads=2)
    expected = full(model, IDS)
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            full(model, IDS)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(10):
            assert in_child(lambda: np.array_equal(full(model, IDS), expected))
    finally:
        stop.set()
        thread.join()


@needs_fork
def test_a_child_may_drop_a_team_of_its_parent() -> None:
    teams = [_native.Threads(3)]
    teams[0].run(lambda _: None)

    def child() -> bool:
        teams.clear()
        return True

    assert in_child(child)


# How many


def system(root: Path, *, siblings: int = 1, packages: int = 1, **files: str) -> str:
    """A tree of files as Linux shows them: eight CPUs, and cgroup files by name."""
    for cpu in range(8):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        core, package = cpu // siblings, cpu * packages // 8
        (folder / "core_id").write_text(f"{core if packages == 1 else cpu % (8 // packages)}\n")
        (folder / "physical_package_id").write_text(f"{package}\n")
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("cpus", "siblings", "packages", "cores"),
    [
        (range(8), 1, 1, 8),
        (range(8), 2, 1, 4),
        ([0, 1], 2, 1, 1),
        ([0, 2, 4], 2, 1, 3),
        ([5], 1, 1, 1),
        (range(8), 1, 2, 8),
        ([0, 99], 1, 1, 2),
        ([], 1, 1, 1),
    ],
)
def test_physical_cores_of_the_affinity_mask(
    tmp_path: Path, cpus: list[int], siblings: int, packages: int, cores: int
) -> None:
    root = system(tmp_path, siblings=siblings, packages=packages)
    assert _native.cores(list(cpus), root) == cores


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu_dot_max": "max 100000\n"}, 8),
        ({"cpu_dot_max": "350000 100000\n"}, 3),
        ({"cpu_dot_max": "20000 100000\n"}, 1),
        ({"a__cpu_dot_max": "500000 100000\n"}, 5),
        ({"a__b__cpu_dot_max": "200000 100000\n", "a__cpu_dot_max": "400000 100000\n"}, 2),
        ({"a__b__cpu_dot_max": "max 100000\n", "a__cpu_dot_max": "400000 100000\n"}, 4),
        ({"cpu_dot_max": "nonsense"}, 8),
        ({"cpu_dot_max": ""}, 8),
        ({"cpu_dot_max": "100000 0"}, 8),
    ],
)
def test_quota_of_cgroup_2(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    named = {f"sys__fs__cgroup__{name}": text for name, text in files.items()}
    root = system(tmp_path, proc__self__cgroup="0::/a/b\n", **named)
    assert _native.cores(list(range(8)), root) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("250000", 2), ("1000", 1)])
def test_quota_of_cgroup_1(tmp_path: Path, quota: str, cores: int) -> None:
    folder = "sys__fs__cgroup__cpu__docker__x"
    root = system(
        tmp_path,
        proc__self__cgroup="12:memory:/m\n4:cpu,cpuacct:/docker/x\nbroken line\n",
        **{f"{folder}__cpu_dot_cfs_quota_us": quota, f"{folder}__cpu_dot_cfs_period_us": "100000"},
    )
    assert _native.cores(list(range(8)), root) == cores


def test_the_default_is_what_this_process_may_use() -> None:
    cores = _native.available_cores()
    assert 1 <= cores <= len(os.sched_getaffinity(0))
    assert native.backend.load(CONFIG, WEIGHTS).threads == cores


def test_the_probe_measures_this_machine() -> None:
    limits = _native.probe(1)
    assert 0.5 < limits.read_gb_s < 1000
    assert limits.dot_gmac_s == 0 or 1 < limits.dot_gmac_s < 5000
