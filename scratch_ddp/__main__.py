"""The project's commands: `python3 -m scratch_ddp lab`, `python3 -m scratch_ddp test`, and a teacher's tools.

Any Python 3.11 or newer will do: the first run makes a virtual environment and goes on inside it. So this module and
`commands.environment` use the standard library only, and nothing that an older Python could not even read.
"""

import importlib
import sys

from scratch_ddp.commands import environment

COMMANDS = {  # name: (module of scratch_ddp.commands with `main(arguments) -> exit status`, what it does)
    "lab": ("lab", "open JupyterLab on your own copies of the lessons (further arguments go to JupyterLab)"),
    "copy": ("copies", "make a fresh copy of a lesson, or a folder of lessons for students"),
    "book": ("book", "build a site of all lessons with their outputs, to be read without installing anything"),
    "refresh": ("refresh", "run lessons again and save their outputs as they are committed"),
    "grade": ("grade", "run notebooks (trusted code only) and say which of their exercises hold"),
    "test": ("test", "run every check: ruff, the tests, all lessons (arguments: that pytest call only)"),
}


def usage() -> str:
    lines = ["usage: python3 -m scratch_ddp COMMAND [arguments]", ""]
    return "\n".join(lines + [f"  {name:9}{what}" for name, (_, what) in COMMANDS.items()])


def main(arguments) -> int:
    """Set up the environment, then run one command inside it; returns the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        raise SystemExit(f"There is no command {command!r}.\n\n{usage()}")
    environment.enter(arguments)
    return importlib.import_module("scratch_ddp.commands." + COMMANDS[command][0]).main(rest)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
