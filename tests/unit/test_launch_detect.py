"""Which launcher started this process, as told by its variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commrt.bootstrap import FileRendezvous, LaunchInfo, TcpRendezvous, TorchRendezvous, detect
from commrt.bootstrap.launchers import LAUNCHERS
from commrt.errors import ConfigError

Environ = dict[str, str]

RUN = {
    "COMMRT_RANK": "1",
    "COMMRT_SIZE": "4",
    "COMMRT_LOCAL_RANK": "1",
    "COMMRT_LOCAL_SIZE": "4",
    "COMMRT_LAUNCHER": "commrt run",
    "COMMRT_RENDEZVOUS": "127.0.0.1:4000",
    "COMMRT_SECRET_FD": "9",
}
PLAIN_TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {
    **PLAIN_TORCH,
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_JOBID": "j"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}


def place(info: LaunchInfo) -> tuple[int, int, int, int, str]:
    return info.rank, info.size, info.local_rank, info.local_size, info.launcher


def test_nothing() -> None:
    assert detect({}) == LaunchInfo(0, 1, 0, 1, "none")


def test_commrt_run() -> None:
    info = detect(RUN)
    assert place(info) == (1, 4, 1, 4, "COMMRT_*")
    assert info.rendezvous == TcpRendezvous("127.0.0.1", 4000, None, 9)
    assert info.variables["COMMRT_RANK"] == "1"
    assert "rank 1 of 4" in str(info)


def test_commrt_run_rank_0_inherits_the_listener() -> None:
    info = detect(RUN | {"COMMRT_RANK": "0", "COMMRT_LOCAL_RANK": "0", "COMMRT_STORE_FD": "5"})
    assert info.rendezvous == TcpRendezvous("127.0.0.1", 4000, 5, 9)


def test_torchrun() -> None:
    info = detect(TORCHRUN)
    assert place(info) == (3, 4, 1, 2, "torchrun")
    assert info.rendezvous == TorchRendezvous("127.0.0.1", 29500, "commrt/job/2")


def test_torch_variables_without_an_agent() -> None:
    info = detect(PLAIN_TORCH)
    assert place(info) == (3, 4, 1, 4, "torchrun")
    assert info.rendezvous == TcpRendezvous("127.0.0.1", 29500)


@pytest.mark.parametrize("environ", [OPEN_MPI, MPICH], ids=["Open MPI", "MPICH"])
def test_mpi_meets_in_a_private_file(environ: Environ, tmp_path: Path) -> None:
    info = detect(environ | {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert isinstance(info.rendezvous, FileRendezvous)
    assert info.rendezvous.private
    assert Path(info.rendezvous.path).parent == tmp_path / "commrt"
    same, other = (
        detect(environ | {"XDG_RUNTIME_DIR": "/nonexistent"}),
        detect({**environ, "PMIX_NAMESPACE": "x", "PMI_JOBID": "x"}),
    )
    assert isinstance(same.rendezvous, FileRendezvous)
    assert isinstance(other.rendezvous, FileRendezvous)
    assert Path(same.rendezvous.path).parent == Path(f"/tmp/commrt-{os.geteuid()}")
    assert Path(same.rendezvous.path).name == Path(info.rendezvous.path).name != Path(other.rendezvous.path).name
    assert "prterun" not in info.rendezvous.path


def test_mpi_places() -> None:
    assert place(detect(OPEN_MPI)) == (2, 3, 2, 3, "Open MPI")
    assert place(detect(MPICH)) == (1, 2, 1, 2, "MPICH or Intel MPI")


def test_mpi_with_a_master() -> None:
    info = detect(OPEN_MPI | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4001"})
    assert info.rendezvous == TcpRendezvous("10.0.0.1", 4001)


def test_mpi_over_several_hosts_has_no_place_of_its_own() -> None:
    assert detect(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).rendezvous is None


def test_slurm() -> None:
    assert place(detect(SLURM)) == (5, 6, 1, 2, "Slurm")
    assert detect(SLURM).rendezvous is None
    one_host = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "6", "SLURM_NODEID": "0", "SLURM_LOCALID": "5"}
    assert isinstance(detect(one_host).rendezvous, FileRendezvous)
    assert detect(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2)"}).local_size == 3


def test_the_shell_of_a_batch_job_is_no_rank() -> None:
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}).launcher == "none"
    assert detect({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}).launcher == "none"
    assert detect(OPEN_MPI | {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}).launcher == "Open MPI"


def test_order() -> None:
    assert [launcher.name for launcher in LAUNCHERS] == [
        "COMMRT_*",
        "torchrun",
        "Open MPI",
        "MPICH or Intel MPI",
        "Slurm",
    ]
    assert detect(RUN | TORCHRUN | OPEN_MPI | MPICH | SLURM).launcher == "COMMRT_*"
    assert detect(TORCHRUN | OPEN_MPI | SLURM).launcher == "torchrun"


def test_explicit_arguments_ignore_the_environment() -> None:
    info = detect(RUN | PLAIN_TORCH, rank=0, size=2, rendezvous="[::1]:5000")
    assert place(info) == (0, 2, 0, 2, "arguments")
    assert info.rendezvous == TcpRendezvous("::1", 5000)
    assert detect(RUN, rank=0, size=1) == LaunchInfo(0, 1, 0, 1, "arguments")


def test_explicit_rank_and_size_with_a_place_from_the_environment() -> None:
    assert detect({"COMMRT_RENDEZVOUS": "h:1"}, rank=0, size=2).rendezvous == TcpRendezvous("h", 1)
    assert detect({"MASTER_ADDR": "h", "MASTER_PORT": "1"}, rank=0, size=2).rendezvous == TcpRendezvous("h", 1)
    assert detect(RUN, rank=1, size=4).launcher == "COMMRT_*"


def test_another_place_than_torchruns() -> None:
    assert detect(TORCHRUN, rendezvous="h:1").rendezvous == TcpRendezvous("h", 1)
    assert detect(TORCHRUN | {"COMMRT_RENDEZVOUS": "file:///x/y?host=::1"}).rendezvous == FileRendezvous("/x/y", "::1")


def test_the_secret_file_is_passed_on() -> None:
    assert detect({"COMMRT_SECRET_FILE": "/x"}, rank=0, size=2, rendezvous="h:1").secret_file == "/x"
    assert detect(RUN | {"COMMRT_SECRET_FILE": "/x"}).secret_file == "/x"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"COMMRT_RANK": "1"}, ["COMMRT_RANK=1", "COMMRT_SIZE"]),
        ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE"]),
        ({"PMI_SIZE": "1"}, ["PMI_SIZE=1", "PMI_RANK"]),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["RANK=4", "WORLD_SIZE=4"]),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, ["RANK=-1"]),
        ({"RANK": "one", "WORLD_SIZE": "4"}, ["RANK=one"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        ({"RANK": "0", "WORLD_SIZE": "9" * 100}, ["WORLD_SIZE=999"]),
        ({"RANK": "٣", "WORLD_SIZE": "4"}, ["RANK="]),
        (PLAIN_TORCH | {"LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "WORLD_SIZE=4"]),
        (TORCHRUN | {"LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "5"}, ["LOCAL_WORLD_SIZE=5", "WORLD_SIZE=4"]),
        (PLAIN_TORCH | {"MASTER_PORT": "0"}, ["MASTER_PORT"]),
        (PLAIN_TORCH | {"MASTER_PORT": "70000"}, ["MASTER_PORT"]),
        (PLAIN_TORCH | OPEN_MPI, ["RANK=3", "WORLD_SIZE=4", "OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=3"]),
        (OPEN_MPI | {"RANK": "1", "WORLD_SIZE": "3"}, ["RANK=1", "OMPI_COMM_WORLD_RANK=2"]),
        ({"COMMRT_RANK": "0", "COMMRT_SIZE": "4"} | PLAIN_TORCH, ["COMMRT_RANK=0", "RANK=3"]),
        (OPEN_MPI | MPICH, ["OMPI_COMM_WORLD_SIZE=3", "PMI_SIZE=2"]),
        (SLURM | {"SLURM_NODEID": "2"}, ["SLURM_NODEID=2", "SLURM_STEP_TASKS_PER_NODE=4,2"]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x"}, ["SLURM_STEP_TASKS_PER_NODE=4(x"]),
        (RUN | {"COMMRT_SECRET_FD": "x"}, ["COMMRT_SECRET_FD=x"]),
        (RUN | {"COMMRT_RENDEZVOUS": "127.0.0.1"}, ["COMMRT_RENDEZVOUS", "127.0.0.1"]),
    ],
    ids=lambda value: "-".join(value)[:40] if isinstance(value, list) else None,
)
def test_contradictions_name_the_variables_and_their_values(environ: Environ, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(environ)
    assert all(word in str(caught.value) for word in words), caught.value


def test_agreeing_launchers_are_no_contradiction() -> None:
    assert detect(OPEN_MPI | {"RANK": "2", "WORLD_SIZE": "3"}).launcher == "torchrun"
    assert detect(OPEN_MPI | {"PMI_RANK": "0", "PMI_SIZE": "1"}).launcher == "Open MPI"
    assert detect(OPEN_MPI | {"WORLD_SIZE": "3"}).launcher == "Open MPI"
    assert detect(RUN | {"WORLD_SIZE": "3"}).launcher == "COMMRT_*"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": 2}, ["rank=2", "COMMRT_RANK=1"]),
        ({"rank": 1, "size": 5}, ["size=5", "COMMRT_SIZE=4"]),
        ({"rendezvous": "h:1"}, ["rendezvous=h:1", "COMMRT_RENDEZVOUS=127.0.0.1:4000"]),
    ],
)
def test_arguments_that_contradict_the_launcher(arguments: dict[str, int], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(RUN, **arguments)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "arguments",
    [
        {"rank": 1},
        {"size": 2},
        {"rendezvous": "h:1"},
        {"rank": 2, "size": 2, "rendezvous": "h:1"},
        {"rank": -1, "size": 2, "rendezvous": "h:1"},
        {"rank": 0, "size": 0, "rendezvous": "h:1"},
        {"rank": 1, "size": 1},
        {"rank": 0, "size": 1 << 20, "rendezvous": "h:1"},
    ],
)
def test_bad_arguments(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        detect({}, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h",
        "h:",
        ":1",
        "h:x",
        "h:0",
        "h:65536",
        "h:-1",
        "::1:80",
        "http://h:1",
        "file://relative",
        "file:///",
        "file:///x?y=1",
    ],
)
def test_malformed_places(text: str) -> None:
    with pytest.raises(ConfigError):
        detect({}, rank=0, size=2, rendezvous=text)
