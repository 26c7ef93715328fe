"""How the tests are shared out among the processes of ``pytest -n``: who runs what, and when.

A file's tests run in one process. So do those of several files that use something which takes
long to start: it is started once. What is heavy begins first, so that it is not waited for at the
end; one process begins at the other end, as heavy tests leave the cores idle while they wait for
their servers. Tests marked ``alone`` measure seconds or memory: they come last, while nothing else
runs. Of those marked ``vllm`` one runs at a time: a real engine takes both cores while it starts.
Without ``-n`` everything runs in the order of the folders, in one process.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

GROUPS = {
    "tests/contract/engine/": "engine",
    "tests/up/": "engine",
    "tests/test_readme": "engine",
    "tests/machines/": "machines",
    "tests/fleet/": "fleet",
    "tests/slurm/": "slurm",
    "tests/deployed/test_faults": "faults of the deployed",
    "tests/deployed/test_deploy_command": "deploy",
    "tests/deployed/": "deployed",
    "tests/cli/test_up": "up",
    "tests/cli/test_run": "run",
    "tests/cli/test_bad_input": "run",
    "tests/cli/test_private_files": "run",
    "tests/cli/test_submit": "run",
    "tests/flows/": "flows",
    "tests/contract/storage/": "storage",
    "tests/api/test_postgres_and_s3": "storage",
    "tests/mixtures/": "storage",
    "tests/network/test_prefect": "network with Prefect",
    "tests/network/": "storage",
}
"""By the beginning of a file's path: which other files its tests stay together with."""

DEPLOYED = (
    "tests/api/test_beside_prefect",
    "tests/api/test_live",
    "tests/api/test_openapi",
    "tests/api/test_postgres_and_s3",
    "tests/benchmarks/",
    "tests/cli/",
    "tests/contract/engine/",
    "tests/contract/storage/",
    "tests/contract/store/test_many",
    "tests/deploy/",
    "tests/deployed/",
    "tests/faults/",
    "tests/fleet/",
    "tests/flows/",
    "tests/machines/",
    "tests/migrations/",
    "tests/mixtures/",
    "tests/page/",
    "tests/slurm/",
    "tests/steps/test_chains",
    "tests/steps/test_datasets",
    "tests/steps/test_deep_validation",
    "tests/steps/test_one_error_one_chunk",
    "tests/test_mutations",
    "tests/test_read_the_results",
    "tests/test_readme",
    "tests/test_side_by_side",
    "tests/test_wheel",
    "tests/up/",
    "tests/year/",
)
"""What the paths of the tests of `make test-deployed` begin with: they start whole commands,
servers with workers, engines, machines or browsers, or take long. Tests with PostgreSQL and those
marked ``vllm`` belong to it as well, wherever they are."""

HEAVY = (
    "engine",
    "faults of the deployed",
    "machines",
    "fleet",
    "slurm",
    "deployed",
    "deploy",
    "up",
    "run",
    "tests/cli/",
    "flows",
    "tests/faults/",
    "storage",
    "tests/steps/test_one_error",
    "tests/contract/store/test_many",
    "tests/test_mutations",
    "tests/steps/",
    "tests/contract/",
    "tests/api/",
)
"""What begins first, in this order; everything else comes after it, as collected."""

ALONE = "alone"


class TogetherByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist's has no types
    """Tests of a group share a process, and so do those of a file that is in none."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        # The order is that of the processes' collections: by weight, not by number.
        config.option.loadscopereorder = False

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        """Refuse tests that have the same id: xdist would run one of them, and say nothing."""
        counted = collections.Counter(collection)
        if twice := [nodeid for nodeid, count in counted.items() if count > 1]:
            raise pytest.UsageError(f"Several tests have one id: {', '.join(twice)}")
        super().add_node_collection(node, collection)

    def _assign_work_unit(self, node: Any) -> None:
        """Give it what is heaviest; to the one that was ready last, what is lightest."""
        if node is self.nodes[-1] and len(self.nodes) > 1:
            light = next((scope for scope in reversed(self.workqueue) if scope != ALONE), ALONE)
            self.workqueue.move_to_end(light, last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid, is_alone=nodeid in self._alone)

    @functools.cached_property
    def _alone(self) -> frozenset[str]:
        """As the processes have written it, which know the marks."""
        return frozenset((self.config.stash[_SHARED] / "alone").read_text().splitlines())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """``-n auto``: two for each core, as a test waits half of its time, and one for light tests."""
    return 2 * len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TogetherByFile:
    return TogetherByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give all processes one folder, for locks and for what the scheduler is to know."""
    stash = node.config.stash
    if _SHARED not in stash:
        stash[_SHARED] = Path(tempfile.mkdtemp(prefix="side-by-side-"))
        node.config.add_cleanup(lambda: shutil.rmtree(stash[_SHARED]))
    node.workerinput["shared"] = str(stash[_SHARED])


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of `make test-deployed`."""
    is_named = item.nodeid.startswith(DEPLOYED) or item.get_closest_marker("vllm")
    if is_named or "postgres" in item.name.partition("[")[2].rstrip("]").split("-"):
        item.add_marker("deployed")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test an id of its own, and put them in order."""
    _tell_apart(items)
    if (shared := _shared_folder(config)) is not None:
        alone = [item.nodeid for item in items if _is_alone(item)]
        (shared / "alone").write_text("\n".join(alone))
        items.sort(key=_place)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Outermost, so that waiting for a turn is no part of a test's time."""
    shared = _shared_folder(item.config)
    with contextlib.ExitStack() as stack:
        if shared is not None:
            if item.get_closest_marker("vllm"):
                stack.enter_context(_locked(shared / "engine", fcntl.LOCK_EX))
            stack.enter_context(_turn(shared, _is_alone(item)))
        return (yield)


def _shared_folder(config: pytest.Config) -> Path | None:
    """None without ``-n``."""
    shared = getattr(config, "workerinput", {}).get("shared")
    return None if shared is None else Path(shared)


def _tell_apart(items: list[pytest.Item]) -> None:
    """Schemathesis leaves the operation out of its tests' ids; it is in their names."""
    for item in items:
        start, _, name = item.nodeid.rpartition("::")
        if item.name.startswith(f"{name}["):
            item._id = type(item.id).parse(f"{start}::{item.name}")


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker(ALONE) is not None


def _group(nodeid: str, *, is_alone: bool) -> str:
    path = nodeid.partition("::")[0]
    found = next((group for start, group in GROUPS.items() if path.startswith(start)), None)
    return found or (ALONE if is_alone else path)


def _place(item: pytest.Item) -> tuple[int, bool]:
    is_alone = _is_alone(item)
    group = _group(item.nodeid, is_alone=is_alone)
    if group == ALONE:
        return len(HEAVY) + 1, is_alone
    found = (place for place, start in enumerate(HEAVY) if group.startswith(start))
    return next(found, len(HEAVY)), is_alone


_SHARED = pytest.StashKey[Path]()


@contextlib.contextmanager
def _turn(folder: Path, is_alone: bool) -> Iterator[None]:
    """Beside other tests, or while no other one runs. Who waits to be alone is next."""
    kind = fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH
    with (
        _locked(folder / "queue", fcntl.LOCK_EX) as queue,
        _locked(folder / "tests", kind),
    ):
        if not is_alone:
            fcntl.flock(queue, fcntl.LOCK_UN)
        yield


@contextlib.contextmanager
def _locked(path: Path, kind: int) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind)
        yield descriptor
    finally:
        os.close(descriptor)
