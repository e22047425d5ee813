"""`python -m scratch_ddp.instruments.cost`: what training a model takes, from its config, without its weights."""

import argparse
import sys
from pathlib import Path

from scratch_ddp.instruments.cost.layouts.clusters import CLUSTERS, Cluster, cluster
from scratch_ddp.instruments.cost.layouts.forecast import EFFICIENCY
from scratch_ddp.instruments.cost.layouts.models import MODELS, model
from scratch_ddp.instruments.cost.layouts.plan import USABLE, Plan, plan
from scratch_ddp.instruments.cost.memory import MIXED, STAGES, model_states
from scratch_ddp.instruments.cost.transformer.flops import flops_per_token, training
from scratch_ddp.instruments.cost.transformer.shape import ModelShape, from_config


def main(arguments: list[str] | None = None) -> int:
    """Print the tables. Return the exit status: 1 if no layout fits, 2 for input that can't be."""
    options = _parser().parse_args(arguments)
    try:
        shape = from_config(options.model) if Path(options.model).exists() else model(options.model)
        machine = cluster(options.gpu)
        if options.gpus < 1:
            raise ValueError(f"--gpus must be 1 or more, not {options.gpus}")
        print(_sizes(shape, options.sequence), _states(shape, options.gpus), sep="\n\n")
        if shape.experts:
            print(f"\n{shape.name} is a mixture of experts: its layouts can't be forecast here.")
            return 0
        found = plan(shape, machine, options.gpus, options.batch, options.sequence, options.efficiency, options.usable)
        print(f"\n{options.gpus} {machine.device.name}, {options.batch} sequences of {options.sequence} tokens a step:")
        print(found.table(options.most))
        if found.best:
            print("\n" + _whole_training(found, machine, options.tokens, options.price))
    except ValueError as error:
        print(f"cost: {error}", file=sys.stderr)
        return 2
    return 0 if found.best else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scratch_ddp.instruments.cost", description=__doc__)
    parser.add_argument("--model", required=True, help=f"a config.json of transformers, or one of {', '.join(MODELS)}")
    parser.add_argument("--gpus", type=int, required=True, help="number of devices")
    parser.add_argument("--gpu", default="H100", help=f"kind of device: {', '.join(CLUSTERS)} (H100)")
    parser.add_argument("--batch", type=int, default=512, help="sequences in a step, on all devices together (512)")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a sequence (4096)")
    parser.add_argument("--tokens", type=float, default=1e12, help="of the whole training (1e12)")
    parser.add_argument("--price", type=float, help="dollars for an hour of a device")
    parser.add_argument("--efficiency", type=float, default=EFFICIENCY, help=f"of the peak ({EFFICIENCY})")
    parser.add_argument("--usable", type=float, default=USABLE, help=f"share of the memory ({USABLE})")
    parser.add_argument("--most", type=int, default=5, help="layouts to show (5)")
    return parser


def _sizes(shape: ModelShape, sequence: int) -> str:
    active = f", {shape.active_parameters:,} active" if shape.experts else ""
    flops = flops_per_token(shape, sequence) / 1e9
    return f"{shape.name}: {shape.parameters:,} parameters{active}, {flops:,.1f} GFLOP a token of {sequence}"


def _states(shape: ModelShape, devices: int) -> str:
    lines = [f"{'GB of a rank':14}{'weights':>10}{'gradients':>11}{'master':>10}{'optimizer':>11}{'total':>10}"]
    for stage in STAGES:
        each = model_states(shape.parameters, devices, stage, precision=MIXED)
        parts = (each.weights, 10), (each.gradients, 11), (each.master, 10), (each.optimizer, 11), (each.total, 10)
        lines.append(f"{stage:14}" + "".join(f"{nbytes / 1e9:{width},.1f}" for nbytes, width in parts))
    return "\n".join(lines)


def _whole_training(found: Plan, machine: Cluster, tokens: float, price: float | None) -> str:
    best = found.best[0]
    flops = flops_per_token(found.shape, found.sequence)
    used = flops * found.batch * found.sequence / best.time.total / (found.devices * machine.device.flops)
    price = machine.device.price if price is None else price
    whole = training(flops * tokens, found.devices, machine.device.flops, used, price)
    return (
        f"{tokens:.3g} tokens with the first: {whole.days:,.1f} days, {whole.device_hours:,.0f} device hours, "
        f"${whole.money:,.0f} at ${price:g} an hour; {used:.0%} of the peak (with efficiency {found.efficiency:g})."
    )


if __name__ == "__main__":
    sys.exit(main())
