"""`python -m scratch_ddp.benchmark WHAT`: measure, and print a table of the README."""

import argparse

from scratch_ddp.benchmark import cells, collectives, link, pipeline, rings, seldom, steps, tensor_parallel, training
from scratch_ddp.instruments.sizes import count

ROUNDS = {training: 20, tensor_parallel: 20, pipeline: 20, rings: 40, link: 20, seldom: 3, cells: 20}  # by default


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scratch_ddp.benchmark", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for module in (*ROUNDS, collectives):
        name, what = module.__name__.rpartition(".")[2], module.__doc__.partition("\n")[0]
        command = commands.add_parser(name, help=what, description=what)
        command.set_defaults(module=module, what=what)
        if module is collectives:
            collectives.add_arguments(command)
        else:
            command.add_argument("--rounds", type=count, default=ROUNDS[module], help="of each kind (%(default)s)")
    options = parser.parse_args()
    if options.module is collectives:
        collectives.main(options)
    else:
        steps.show(options.what, options.module.rows(options.rounds))


if __name__ == "__main__":
    main()
