"""The job scripts for Slurm and ssh, with a fake srun and a fake ssh that run the commands here, host after host."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from scratch_ddp.commands.environment import ROOT
from scratch_ddp.training import __main__ as training

SCRIPTS = ROOT / "assets" / "many_machines"
PROGRAMS = {
    "scontrol": 'echo first; echo second; test "$*" = "show hostnames first,second"',
    "srun": """test "$1 $2 $3 $SRUN_CPUS_PER_TASK" = "--no-kill --kill-on-bad-exit=0 --wait=0 32"; shift 3
for node in 0 1; do
    names=(first second)
    SLURM_NODEID=$node SLURMD_NODENAME=${names[node]} "$@"
done""",
    "ssh": 'test "$1" = -tt; shift 2; exec bash -c "$*"',
    # In one write: two hosts may call at once.
    "torchrun": """echo "$(printf '%q ' "$@") store:$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" >> $CALLS""",
}
SLURM = {"SLURM_JOB_NODELIST": "first,second", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}
SLURM |= {"SLURM_CPUS_PER_TASK": "32", "SLURM_JOB_ID": "77"}


def torchruns(folder: Path, script: str, *arguments: str, **variables: str) -> list:
    """Run a script with fake programs; return torchrun's options and the training's arguments for each host."""
    for name, body in PROGRAMS.items():
        program = folder / name
        program.write_text(f"#!/bin/bash\nset -e\n{body}\n")
        program.chmod(0o755)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": f"{folder}/calls"} | variables
    environment["SLURM_SUBMIT_DIR"] = str(folder)
    subprocess.run([str(SCRIPTS / script), *arguments], cwd=folder, env=environment, check=True, timeout=30)
    hosts = []
    for line in (folder / "calls").read_text().splitlines():
        *words, store = shlex.split(line)
        assert store == "store:1"
        hosts.append(get_args_parser().parse_args(words))
    return sorted(hosts, key=lambda host: host.rdzv_conf, reverse=True)  # the one that keeps the rendezvous first


@pytest.mark.parametrize(
    ("script", "arguments", "variables", "addresses", "port", "ranks"),
    [
        ("train.sbatch", (), SLURM, ["first", "second"], 20077, "4"),
        ("train_over_ssh.sh", ("10.0.0.1", "10.0.0.2"), {"RANKS": "2"}, ["10.0.0.1", "10.0.0.2"], 29500, "2"),
    ],
)
def test_each_host_gets_its_torchrun(tmp_path, monkeypatch, script, arguments, variables, addresses, port, ranks):
    hosts = torchruns(tmp_path, script, *arguments, **variables)
    assert [host.local_addr for host in hosts] == addresses
    assert [host.rdzv_conf for host in hosts] == ["is_host=1", "is_host=0"]
    assert {host.rdzv_endpoint for host in hosts} == {f"{addresses[0]}:{port}"}
    assert len({host.rdzv_id for host in hosts}) == 1
    for host in hosts:
        assert (host.nnodes, host.nproc_per_node, host.max_restarts, host.rdzv_backend) == ("1:2", ranks, 20, "c10d")
        assert host.module and host.training_script == "scratch_ddp.training"
        monkeypatch.setattr("sys.argv", ["training", *host.training_script_args])
        options = training.arguments()
        assert options.every == 50 and isinstance(options.checkpoints, Path) and options.timeout.seconds == 60
