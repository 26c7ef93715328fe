"""Jobs of Slurm, without Slurm: what is submitted, what is read, what is concluded."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from typing import TYPE_CHECKING

import pytest
from prefect.client.schemas.objects import FlowRun

from batchyard.dispatch.run_states import PUT_OFF, STOPPED, is_in_queue
from commands.slurm.cluster import Job, by_flow_run, comment_of, jobs_in
from commands.slurm.job_script import script_of, words_of
from commands.slurm.options import JobOptions
from commands.slurm.template import JobConfiguration, base_job_template
from commands.slurm.verdict import (
    LEAVE_SECONDS,
    STARTING,
    Cancel,
    Seen,
    SetState,
    Tell,
    verdict,
)
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

    from commands.slurm.verdict import Verdict


def words(**options: object) -> list[str]:
    made = JobOptions.model_validate(options)
    return words_of(made, name="model", comment="batchyard gpu 1", output="/logs/%j")


def job(state: str, reason: str = "") -> Job:
    return Job("7", "run", state, reason, "" if state == "PENDING" else "node1")


# -- what is submitted --------------------------------------------------------------------------


def test_a_job_has_the_options_of_its_pool() -> None:
    found = words(
        partition="a100",
        account="ml",
        qos="low",
        gpus="h100:2",
        cpus=8,
        memory="64G",
        time_limit="4:00:00",
        options=["--constraint=nvlink"],
    )
    assert found[0] == "sbatch"
    assert found[-1] == "--constraint=nvlink"
    assert {
        *("--partition=a100", "--account=ml", "--qos=low", "--gres=gpu:h100:2"),
        *("--cpus-per-task=8", "--mem=64G", "--time=4:00:00", "--nodes=1"),
    } <= set(found)


def test_what_a_pool_does_not_say_is_left_to_the_cluster() -> None:
    names = {word.partition("=")[0] for word in words()}
    assert not names & {"--partition", "--account", "--qos", "--mem", "--time", "--cpus-per-task"}
    assert not [word for word in words(gpus=0) if "gres" in word]


def test_a_pool_may_ask_for_the_nodes_of_an_engine_over_several_machines() -> None:
    """With a number of tasks that is less, Slurm would take as many nodes as there are tasks."""
    found = words(options=["--nodes=2"])
    assert found.index("--nodes=1") < found.index("--nodes=2")
    assert not [word for word in found if word.startswith("--ntasks")]


def test_slurms_signal_comes_a_minute_before_the_drain_has_to_end() -> None:
    assert "--signal=B:TERM@120" in words(drain_seconds=60)


def test_a_flow_run_has_what_its_template_says_unless_it_says_something_else() -> None:
    template = base_job_template(JobOptions(partition="a100", gpus=2))
    names = set(template["variables"]["properties"])
    assert template["job_configuration"] == {name: f"{{{{ {name} }}}}" for name in names}
    assert names == {*JobConfiguration.model_fields}
    assert template["variables"]["properties"]["partition"]["default"] == "a100"
    assert "default" not in template["variables"]["properties"]["account"] or (
        template["variables"]["properties"]["account"]["default"] is None
    )


def test_the_command_of_a_job_is_ours() -> None:
    """Prefect's own ends the flow run at the first SIGTERM."""
    run = FlowRun(id=uuid.UUID(int=7), name="model", flow_id=uuid.UUID(int=8))
    for given, command in (({}, "batchyard execute"), ({"command": "other"}, "other")):
        configuration = JobConfiguration.model_validate(given)
        configuration.prepare_for_flow_run(run)
        assert f"\n{command} &\n" in script_of(configuration)


def run_script(folder: Path, command: str, **options: str) -> subprocess.Popen[bytes]:
    """The script of a job as Slurm runs it on a node."""
    made = JobOptions.model_validate({"command": command, "scratch": str(folder), **options})
    path = folder / "script"
    path.write_text(script_of(made))
    return subprocess.Popen(
        ["/bin/bash", path],
        env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node1"},
        stdout=subprocess.PIPE,
    )


def test_a_job_is_a_machine_with_a_home_that_is_removed_at_its_end(tmp_path: Path) -> None:
    command = "sh -c 'mkdir \"$BATCHYARD_HOME\"; echo $BATCHYARD_MACHINE $PREFECT_HOME; exit 3'"
    script = run_script(tmp_path, command, setup="export WHAT=ever")
    said, _ = script.communicate(timeout=PATIENCE * 30)
    machine, prefect_home = said.decode().split()
    assert machine == "node1-7"
    assert prefect_home.startswith(f"{tmp_path}/batchyard-7-")
    assert script.returncode == 3
    assert [path.name for path in tmp_path.iterdir()] == ["script"]


def test_nobody_can_foresee_the_folder_of_a_job(tmp_path: Path) -> None:
    """Who makes it first would choose the Python of its engine, and Prefect's profile."""
    homes = set()
    for _ in range(2):
        script = run_script(tmp_path, "sh -c 'echo $BATCHYARD_HOME'")
        said, _ = script.communicate(timeout=PATIENCE * 30)
        homes.add(said)
    assert len(homes) == 2


def test_a_job_that_is_told_to_end_waits_for_its_runner(tmp_path: Path) -> None:
    drains = "sh -c 'trap \"sleep 1; touch drained; exit 5\" TERM; touch begun; sleep 60 & wait'"
    script = run_script(tmp_path, drains, setup=f"cd {tmp_path}")
    deadline = time.monotonic() + PATIENCE * 30
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    script.terminate()
    assert script.wait(PATIENCE * 30) == 5
    assert (tmp_path / "drained").exists()


# -- what is read -------------------------------------------------------------------------------


RUN, NEXT = (str(uuid.UUID(int=number)) for number in (7, 8))


def test_only_the_jobs_of_the_pool_are_ours() -> None:
    listing = (
        f"7|RUNNING|node1|1796000000|None|{comment_of('gpu', RUN)}\n"
        f"8|PENDING||N/A|Resources|{comment_of('gpu', NEXT)}\n"
        f"9|PENDING||1796000000|Resources|{comment_of('gpu-2', RUN)}\n"
        f"9|PENDING||1796000000|Resources|{comment_of('gpu 2', RUN)}\n"
        "10|PENDING||1796000000|Priority|anything | at all\n"
        "11|PENDING||1796000000|Priority|(null)\n"
        "12|PENDING||1796000000|Priority|batchyard gpu is mine\n"
        "13|PENDING||1796000000|Priority|of two\nlines\n"
    )
    assert jobs_in(listing, "gpu") == [
        Job("7", RUN, "RUNNING", "", "node1", 1796000000.0),
        Job("8", NEXT, "PENDING", "Resources", ""),
    ]


def test_a_flow_run_that_ran_again_has_the_job_of_the_last_time() -> None:
    ended, newer = Job("9", RUN, "FAILED"), Job("10", RUN, "TIMEOUT")
    assert by_flow_run([newer, ended])[RUN] is newer
    active = Job("8", RUN, "RUNNING")
    assert by_flow_run([active, newer])[RUN] is active


# -- what is concluded --------------------------------------------------------------------------


def test_a_flow_run_says_why_its_job_waits() -> None:
    found = verdict(job("PENDING", "Resources"), Seen("PENDING", "Submitting"))
    assert found == SetState(
        "PENDING", "InQueue (Resources)", "in Slurm's queue: job 7 waits (Resources)"
    )
    assert is_in_queue("InQueue (Resources)")
    assert verdict(job("PENDING", "Resources"), Seen("PENDING", "InQueue (Resources)")) is None
    again = verdict(job("PENDING", "Priority"), Seen("PENDING", "InQueue (Resources)"))
    assert isinstance(again, SetState)
    assert again.name == "InQueue (Priority)"


def test_a_job_whose_reservation_was_deleted_waits() -> None:
    found = verdict(job("RESV_DEL_HOLD", "ReservationDeleted"), Seen("PENDING"))
    assert isinstance(found, SetState)
    assert found.name == "InQueue (ReservationDeleted)"


def test_a_long_reason_is_cut_in_the_name_of_the_state() -> None:
    reason = "ReqNodeNotAvail, UnavailableNodes:" + "node1," * 1000
    found = verdict(job("PENDING", reason), Seen("PENDING"))
    assert isinstance(found, SetState)
    assert len(found.name) < 120
    assert reason in found.message
    assert verdict(job("PENDING", reason), Seen("PENDING", found.name)) is None


def test_the_time_to_begin_counts_from_the_moment_when_the_job_has_its_node() -> None:
    found = verdict(job("RUNNING"), Seen("PENDING", "InQueue (Resources)", 9999.0))
    assert isinstance(found, SetState)
    assert (found.type, found.name) == ("PENDING", STARTING)
    assert not is_in_queue(found.name)
    assert verdict(job("RUNNING"), Seen("PENDING", STARTING)) is None


@pytest.mark.parametrize("state", ["TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"])
@pytest.mark.parametrize("type_", ["PENDING", "RUNNING"])
def test_a_job_whose_node_was_taken_away_does_not_count_against_its_model(
    state: str, type_: str
) -> None:
    found = verdict(job(state), Seen(type_))
    assert isinstance(found, SetState)
    assert (found.type, found.name) == ("COMPLETED", STOPPED)
    assert f"job 7 on node1 has ended ({state})" in found.message


def test_a_job_that_its_node_lost_in_a_restart_does_not_count_against_its_model() -> None:
    found = verdict(job("FAILED", "JobLaunchFailure"), Seen("RUNNING"))
    assert isinstance(found, SetState)
    assert found.name == STOPPED


@pytest.mark.parametrize("state", ["FAILED", "OUT_OF_MEMORY", "COMPLETED"])
def test_a_job_that_ended_by_itself_without_a_word_is_a_crash(state: str) -> None:
    found = verdict(job(state), Seen("RUNNING"))
    assert isinstance(found, SetState)
    assert found.type == "CRASHED"


def test_a_job_that_an_operator_has_cancelled_is_a_cancelled_flow_run() -> None:
    found = verdict(job("CANCELLED"), Seen("RUNNING"))
    assert isinstance(found, SetState)
    assert found.type == "CANCELLED"


@pytest.mark.parametrize("type_", ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"])
def test_what_a_flow_run_has_said_of_its_end_counts(type_: str) -> None:
    for state in ("COMPLETED", "TIMEOUT", "CANCELLED", "FAILED"):
        assert verdict(job(state), Seen(type_, seconds=9999.0)) is None


@pytest.mark.parametrize(
    ("state", "seen", "expected"),
    [
        ("PENDING", Seen("CANCELLING"), Cancel()),
        ("CONFIGURING", Seen("CANCELLING"), Cancel()),
        ("RUNNING", Seen("CANCELLING"), Tell()),
        ("RUNNING", Seen("CANCELLING", seconds=LEAVE_SECONDS), Cancel()),
        ("PENDING", Seen("CANCELLED"), Cancel()),
        ("RUNNING", Seen("COMPLETED"), None),
        ("RUNNING", Seen("CRASHED", seconds=LEAVE_SECONDS), Cancel()),
        ("RUNNING", Seen("RUNNING", seconds=9999.0), None),
    ],
)
def test_a_job_ends_with_its_flow_run_and_may_drain_first(
    state: str, seen: Seen, expected: Verdict
) -> None:
    assert verdict(job(state), seen) == expected


def test_a_job_whose_time_is_over_soon_is_told() -> None:
    """Slurm tells it as well, unless it is preempted."""
    ending = Job("7", RUN, "RUNNING", node="node1", ends_at=80.0)
    assert verdict(ending, Seen("RUNNING"), 80) == Tell()
    assert verdict(ending, Seen("RUNNING"), 79) is None
    assert verdict(ending, Seen("COMPLETED"), 80) is None


@pytest.mark.parametrize(
    ("seen", "type_", "name"),
    [
        (Seen("PENDING", "InQueue (Priority)", job_id="7"), "COMPLETED", PUT_OFF),
        (Seen("CANCELLING", job_id="7"), "CANCELLED", "Cancelled"),
        (Seen("PENDING", "Submitting", 91.0), "SCHEDULED", "Scheduled"),
        (Seen("PENDING", "Submitting", 10.0), None, ""),
        (Seen("RUNNING", job_id="7"), None, ""),
    ],
)
def test_without_a_job_a_flow_run_that_has_not_begun_is_over_or_submitted_again(
    seen: Seen, type_: str | None, name: str
) -> None:
    found = verdict(None, seen)
    if type_ is None:
        assert found is None
    else:
        assert isinstance(found, SetState)
        assert (found.type, found.name) == (type_, name)
