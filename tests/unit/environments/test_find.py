"""Detection of the cluster environment from variables, and the values read from it."""

import os
import signal
import subprocess

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_pardist import DDPStrategy, ManualEnvironment, MPIEnvironment, SLURMEnvironment, TorchrunEnvironment
from lightning_pardist.runtime.environments.external import candidate_ports
from lightning_pardist.runtime.environments.find import describe, find
from lightning_pardist.runtime.environments.slurm import SLURMShellEnvironment

JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "train"}
STEP = JOB | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
BATCH = JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "4"}
ONE_TASK = STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "n1"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29400",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "1234",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SCHEDULER = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def variables(monkeypatch):
    """Return a function that sets a process's variables to these, and removes all others that matter."""
    prefixes = ("SLURM", "PMI", "OMPI", "MPI_", "TORCHELASTIC", "PET_", "PARDIST", "MASTER")
    for name in list(os.environ):
        if name.startswith(prefixes) or name in TORCHRUN:
            monkeypatch.delenv(name)

    def set_all(found):
        for name, value in found.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        ({}, LightningEnvironment),
        (TORCHRUN, TorchrunEnvironment),
        (STEP, SLURMEnvironment),
        (STEP | TORCHRUN, TorchrunEnvironment),
        (ONE_TASK | TORCHRUN, TorchrunEnvironment),
        (OPEN_MPI, MPIEnvironment),
        (MPICH, MPIEnvironment),
        (OPEN_MPI | TORCHRUN, TorchrunEnvironment),
        # mpirun inside a job starts its daemons through srun, whose variables the ranks inherit.
        (ONE_TASK | OPEN_MPI, MPIEnvironment),
        # srun --mpi=pmix and --mpi=pmi2
        (STEP | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.77.0"}, SLURMEnvironment),
        (STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"}, SLURMEnvironment),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "0"}, MPIEnvironment),
        (BATCH, SLURMShellEnvironment),
        # salloc: a shell on the login node, or one in an interactive step
        (JOB | {"SLURM_JOB_NAME": "interactive"}, SLURMShellEnvironment),
        (BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, SLURMShellEnvironment),
        # srun --pty bash
        (ONE_TASK | {"SLURM_JOB_NAME": "bash"}, SLURMShellEnvironment),
        (ONE_TASK | {"SLURM_PTY_PORT": "41000"}, SLURMShellEnvironment),
        # srun inside a shell of salloc
        (STEP | {"SLURM_JOB_NAME": "interactive"}, SLURMEnvironment),
        (ONE_TASK, SLURMEnvironment),
        (SCHEDULER, ManualEnvironment),
        (SCHEDULER | {"LOCAL_RANK": "1"}, LightningEnvironment),
        (SCHEDULER | {"RANK": "0", "WORLD_SIZE": "1"}, LightningEnvironment),
        # A rank started by the script itself, in a shell of an allocation.
        (STEP | {"PARDIST_PARENT_PID": "1", "LOCAL_RANK": "1"}, LightningEnvironment),
    ],
)
def test_find(variables, found, kind):
    variables(found)
    environment = find()
    assert type(environment) is kind
    assert describe(environment)


def test_notebook_inside_an_allocation(variables, monkeypatch):
    variables(ONE_TASK)
    monkeypatch.setattr("lightning_pardist.runtime.environments.slurm.IS_INTERACTIVE", True)
    assert type(find()) is SLURMShellEnvironment


def test_slurm_step(variables):
    variables(STEP)
    environment = SLURMEnvironment()
    ranks = (environment.world_size(), environment.global_rank(), environment.local_rank(), environment.node_rank())
    assert ranks == (4, 3, 1, 1)
    assert environment.rendezvous_endpoint().address == "n1"
    assert environment.job_key == "slurm-77"
    assert environment.restart_count == 0


def test_slurm_nodes_in_the_order_of_the_step(variables):
    variables(STEP | {"SLURM_STEP_NODELIST": "n2,n1"})
    assert SLURMEnvironment().main_address == "n2"


def test_slurm_first_rank_on_another_node(variables):
    # srun -m arbitrary with a host file
    variables(STEP | {"SLURM_PROCID": "0", "SLURMD_NODENAME": "n2"})
    assert SLURMEnvironment().main_address == "n2"
    variables({"SLURM_PROCID": "1", "SLURMD_NODENAME": "n1"})
    meeting = SLURMEnvironment().rendezvous_endpoint()
    assert (meeting.address, meeting.others) == ("n1", ("n2",))


def test_one_node_meets_on_loopback(variables):
    variables(ONE_TASK)
    meeting = SLURMEnvironment().rendezvous_endpoint()
    assert meeting.address == "127.0.0.1"
    assert meeting.is_local


def test_steps_and_array_tasks_have_ports_of_their_own():
    ports = [candidate_ports(job, step) for job in range(1000, 1016) for step in range(64)]
    assert len({port for candidates in ports for port in candidates}) == 4 * len(ports)
    assert all(1024 < port < 32768 for candidates in ports for port in candidates)


def test_slurm_array_task_is_requeued_by_its_own_number(variables):
    variables(STEP | {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "5", "SLURM_RESTART_COUNT": "2"})
    environment = SLURMEnvironment()
    assert environment.job_key == "slurm-70_5"
    assert environment.restart_count == 2
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    assert environment.requeue(run) == ""
    assert commands == [["scontrol", "requeue", "70_5"]]


def test_requeue_without_scontrol_says_so(variables):
    variables(STEP)

    def run(command, **_):
        raise FileNotFoundError("scontrol")

    assert "could not be run" in SLURMEnvironment.requeue(run)


@pytest.mark.parametrize(
    ("found", "devices", "nodes", "message"),
    [
        (STEP, 2, 1, r"Trainer\(num_nodes=1\), but srun started ranks on 2 node.*Set num_nodes=2"),
        (STEP, 4, 2, r"Trainer\(devices=4\), but srun started 2 task.*--ntasks-per-node=4"),
        (ONE_TASK | {"SLURM_NODEID": "0"}, 2, 1, r"devices=2.*started 1 task.*run it without srun"),
        (BATCH, 4, 1, r"runs python without srun"),
        (BATCH, 2, 2, r"num_nodes=2.*Put `srun` in front"),
        (TORCHRUN, 4, 1, r"Trainer\(devices=4\), but torchrun started 2 rank.*--nproc-per-node=4"),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, 2, 1, r"torchrun runs on 2 host.*num_nodes=2"),
        (TORCHRUN, 2, 2, r"Trainer\(num_nodes=2\), but torchrun runs on 1 host.*num_nodes=1, or `torchrun --nnodes=2`"),
        (OPEN_MPI, 2, 1, r"started 4 ranks, 4 of them on this host. Set devices=4"),
        (SCHEDULER, 2, 2, r"makes 4 ranks, but world_size=2"),
    ],
)
def test_mismatch_is_refused_by_the_trainer(variables, found, devices, nodes, message):
    variables(found)
    with pytest.raises(ValueError, match=message):
        pl.Trainer(strategy="pardist_ddp", accelerator="cpu", devices=devices, num_nodes=nodes, logger=False)


def test_tasks_that_see_one_gpu_each(variables):
    variables(STEP | {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "1"})
    with pytest.raises(ValueError, match="use --gpus-per-node"):
        SLURMEnvironment().validate_settings(num_devices=1, num_nodes=2)


def test_heterogeneous_nodes(variables):
    variables(STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0", "MASTER_ADDR": "localhost"})
    environment = SLURMEnvironment()
    environment.validate_settings(num_devices=3, num_nodes=2)
    environment.validate_settings(num_devices=1, num_nodes=2)
    with pytest.raises(ValueError, match="tasks per node 3,1"):
        environment.validate_settings(num_devices=2, num_nodes=2)


def test_rank_0_elsewhere_is_refused(variables):
    variables(STEP | {"SLURM_PROCID": "0", "MASTER_ADDR": "203.0.113.9"})
    with pytest.raises(ValueError, match="does not have that address"):
        SLURMEnvironment().validate_settings(num_devices=2, num_nodes=2)


def test_address_that_does_not_resolve(variables):
    variables(STEP | {"MASTER_ADDR": "no-such-host.invalid"})
    with pytest.raises(ValueError, match="cannot resolve"):
        SLURMEnvironment().validate_settings(num_devices=2, num_nodes=2)


def test_strategy_by_name_gets_ours_and_others_lightnings(variables):
    # --ntasks without --ntasks-per-node, which Lightning's own class refuses.
    variables(STEP | {"MASTER_ADDR": "localhost"})
    trainer = pl.Trainer(strategy="pardist_ddp", accelerator="cpu", devices=2, num_nodes=2, logger=False)
    assert type(trainer.strategy.cluster_environment) is SLURMEnvironment
    assert trainer.world_size == 4
    with pytest.raises(RuntimeError, match="--ntasks-per-node"):
        pl.Trainer(strategy="ddp", accelerator="cpu", devices=2, num_nodes=2, logger=False)


def test_environment_given_by_hand_is_kept(variables):
    variables(TORCHRUN)
    given = TorchrunEnvironment()
    trainer = pl.Trainer(strategy=DDPStrategy(), plugins=[given], accelerator="cpu", devices=2, logger=False)
    assert trainer.strategy.cluster_environment is given
    plain = LightningEnvironment()
    trainer = pl.Trainer(strategy=DDPStrategy(cluster_environment=plain), accelerator="cpu", devices=1, logger=False)
    assert trainer.strategy.cluster_environment is plain


def test_an_elastic_job_with_fewer_hosts_warns(variables):
    variables(TORCHRUN | {"PET_NNODES": "1:4", "RANK": "0", "LOCAL_RANK": "0"})
    with pytest.warns(UserWarning, match="the global batch is smaller"):
        TorchrunEnvironment().validate_settings(num_devices=2, num_nodes=4)


def test_torchrun_store_of_the_agent(variables):
    variables(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    meeting = TorchrunEnvironment().rendezvous_endpoint()
    assert meeting.hosted
    assert meeting.is_local


def test_mpi_on_several_hosts_needs_an_address(variables):
    variables(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    with pytest.raises(ValueError, match="mpirun -x MASTER_ADDR=HOST"):
        MPIEnvironment().rendezvous_endpoint()
    variables({"OMPI_MCA_orte_hnp_uri": "3456.0;tcp://10.77.0.1:41235"})
    environment = MPIEnvironment()
    assert environment.main_address == "10.77.0.1"
    assert environment.node_rank() == 1


def test_mpi_ranks_of_one_host(variables):
    variables(MPICH)
    environment = MPIEnvironment()
    assert (environment.world_size(), environment.global_rank(), environment.node_rank()) == (2, 1, 0)
    assert environment.rendezvous_endpoint().is_local


def test_mpi4py_of_another_mpi(variables, monkeypatch):
    variables(MPICH)

    class Lonely:
        def Get_size(self):
            return 1

    monkeypatch.setattr("lightning_pardist.runtime.environments.mpi._communicator", Lonely)
    with pytest.raises(ValueError, match="MPI4PY_MPIABI"):
        MPIEnvironment().validate_settings(num_devices=2, num_nodes=1)


def test_manual(variables, tmp_path):
    environment = ManualEnvironment("tcp://localhost:29500", rank=3, world_size=4, local_rank=1)
    environment.validate_settings(num_devices=2, num_nodes=2)
    assert environment.rendezvous_endpoint().address == "localhost"
    shared = ManualEnvironment(f"file://{tmp_path}/meet", rank=0, world_size=2)
    assert shared.rendezvous_endpoint().path == f"{tmp_path}/meet"
    with pytest.raises(ValueError, match="not a place to meet"):
        ManualEnvironment("localhost:29500", rank=0, world_size=2)
    with pytest.raises(ValueError, match="not one of world_size=2"):
        ManualEnvironment("tcp://localhost:29500", rank=2, world_size=2)
    with pytest.raises(ValueError, match="does not exist here"):
        ManualEnvironment("file:///no/such/folder/x", rank=0, world_size=2).validate_settings(1, 2)
    with pytest.raises(RuntimeError, match="RANK is not set"):
        ManualEnvironment("tcp://localhost:29500")


def test_named_in_a_config(variables):
    from jsonargparse import ArgumentParser

    variables(STEP | {"MASTER_ADDR": "localhost"})
    parser = ArgumentParser()
    parser.add_class_arguments(pl.Trainer, "trainer")
    plugin = {"class_path": "lightning_pardist.SLURMEnvironment", "init_args": {"requeue_signal": "SIGUSR2"}}
    config = {"strategy": "pardist_ddp", "accelerator": "cpu", "devices": 2, "num_nodes": 2, "plugins": [plugin]}
    trainer = parser.instantiate_classes(parser.parse_object({"trainer": config | {"logger": False}})).trainer
    assert trainer.strategy.cluster_environment.requeue_signal is signal.SIGUSR2
