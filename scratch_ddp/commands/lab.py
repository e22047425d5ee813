"""`lab`: open JupyterLab on the learner's copies, for this machine only."""

import os
import sys
from pathlib import Path

from scratch_ddp.commands.copies import make_copies
from scratch_ddp.commands.notebooks import COPIES, lesson_paths

SETTINGS = Path(__file__).parent / "jupyter"  # markdown opens as a page, and there is no question about news
NO_IP = (
    "lab refuses {}: it listens on 127.0.0.1, this machine alone, which is the default. Whoever reached it could run "
    "code as you. From another machine, go through ssh: ssh -L 8888:localhost:8888 HOST. In a container, run it with "
    "--network=host, or forward the published port to 127.0.0.1:8888 inside. Then open the printed address."
)


def main(arguments: list[str]) -> int:
    """Make the copies that are missing, then become the JupyterLab server."""
    first_time = not COPIES.exists()
    command = lab_command(arguments, start_at=lesson_paths()[0].name if first_time else "")
    make_copies()
    for name, value in variables(COPIES).items():
        os.environ.setdefault(name, value)
    print(f"Your copies of the lessons are in {COPIES}. End the lab with Ctrl-C.", flush=True)
    os.execv(command[0], command)


def variables(copies: Path) -> dict[str, str]:
    """What the lab runs with unless it is set already.

    Its settings, data and history are beside the copies; kernels show progress bars, and figures for fine screens.
    """
    jupyter = {"CONFIG": "", "DATA": "data", "RUNTIME": "runtime"}
    folders = {f"JUPYTER_{name}_DIR": folder for name, folder in jupyter.items()} | {"IPYTHONDIR": "ipython"}
    settings = {name: str(copies / ".jupyter" / folder) for name, folder in folders.items()}
    return settings | {"JUPYTER_CONFIG_PATH": str(SETTINGS), "SCRATCH_DDP_PROGRESS": "1", "SCRATCH_DDP_RETINA": "1"}


def lab_command(arguments: list[str], start_at: str = "", copies: Path = COPIES) -> list[str]:
    """The command line of a JupyterLab on loopback, opened at one of the copies or at their folder.

    JupyterLab takes port 8888, or says that it is taken and chooses a free one, and prints the address.
    """
    for argument in arguments:
        if argument.lstrip("-").split("=")[0] in ("ip", "ServerApp.ip"):
            raise SystemExit(NO_IP.format(argument))
    # The root is the clone, not the copies' folder: a server shows nothing above its root, and the pictures are there.
    command = [sys.executable, "-m", "jupyterlab", "--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={copies.parent}"]
    command += [f"--FileContentsManager.preferred_dir={copies}", f"--LabApp.workspaces_dir={copies / '.workspaces'}"]
    command += [f"--LabApp.default_url=/lab/tree/{copies.name}/{start_at}"]
    return command + ["--allow-root"] * (os.geteuid() == 0) + arguments
