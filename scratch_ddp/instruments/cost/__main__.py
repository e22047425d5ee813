"""What training a model takes, from its config.json, without its weights: memory, the best layouts, days, money.

Times are for devices that reach 38 to 62 % of their peak while they compute. Against published trainings: Megatron-LM's
GPT of 7.5 to 1,008 billion parameters and Llama 3 405B are within 11 % of the forecast at 55 %; torchtitan's Llama 3 8B
reaches 33 to 39 %, on H100 of 500 W. What the forecast does not have: software that sends slower than the network
(ZeRO-3 of 2021 on 1,536 A100 took four times as long), context and expert parallelism. Memory has no fused kernels:
Llama 3's ranks would need half as much again as they had.
"""

import argparse
import sys
from pathlib import Path

from scratch_ddp.instruments.cost.layouts import CLUSTERS, Cluster, cluster
from scratch_ddp.instruments.cost.models import ModelShape, flops_per_token, from_config
from scratch_ddp.instruments.cost.plan import USABLE, Plan, plan
from scratch_ddp.instruments.cost.published import MODELS, model
from scratch_ddp.instruments.cost.states import MIXED, STAGES, WIDE_GRADIENTS, Precision, model_states
from scratch_ddp.instruments.cost.times import EFFICIENCIES


def main(arguments: list[str] | None = None) -> int:
    """Print the tables. Return the exit status: 1 if no layout fits, 2 for input that can't be."""
    options = _parser().parse_args(arguments)
    precision = WIDE_GRADIENTS if options.wide_gradients else MIXED
    try:
        shape = from_config(options.model) if Path(options.model).exists() else model(options.model)
        machine = cluster(options.gpu)
        print(_sizes(shape, options.sequence), _states(shape, options.gpus, precision), sep="\n\n")
        if shape.experts:
            print(f"\n{shape.name} is a mixture of experts: its layouts can't be forecast here.")
            return 0
        shares = options.efficiency, options.usable, precision
        found = plan(shape, machine, options.gpus, options.batch, options.sequence, *shares)
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
    span = "least and greatest share of the peak ({} {})".format(*EFFICIENCIES)
    parser.add_argument("--efficiency", type=float, nargs=2, metavar="SHARE", default=EFFICIENCIES, help=span)
    parser.add_argument("--usable", type=float, default=USABLE, help=f"share of the memory ({USABLE})")
    parser.add_argument("--wide-gradients", action="store_true", help="gradients are held and sent in float32")
    parser.add_argument("--most", type=int, default=5, help="layouts to show (5)")
    return parser


def _sizes(shape: ModelShape, sequence: int) -> str:
    more = f", {shape.active_parameters:,} active" if shape.experts else ""
    more += f", {shape.beside:,} of them beside the text model" if shape.beside > 0.01 * shape.parameters else ""
    flops = flops_per_token(shape, sequence) / 1e9
    return f"{shape.name}: {shape.parameters:,} parameters{more}, {flops:,.1f} GFLOP a token of {sequence}"


def _states(shape: ModelShape, devices: int, precision: Precision) -> str:
    lines = [f"{'GB of a rank':14}{'weights':>10}{'gradients':>11}{'master':>10}{'optimizer':>11}{'total':>10}"]
    for stage in STAGES:
        each = model_states(shape.parameters, devices, stage, precision=precision)
        parts = (each.weights, 10), (each.gradients, 11), (each.master, 10), (each.optimizer, 11), (each.total, 10)
        lines.append(f"{stage:14}" + "".join(f"{nbytes / 1e9:{width},.1f}" for nbytes, width in parts))
    return "\n".join(lines)


def _whole_training(found: Plan, machine: Cluster, tokens: float, price: float | None) -> str:
    best, price = found.best[0], machine.device.price if price is None else price
    steps, flops = tokens / (found.batch * found.sequence), flops_per_token(found.shape, found.sequence) * tokens
    texts = []
    for step in (best.time.total, best.slow.total):
        hours = steps * step * found.devices / 3600
        used = flops / (3600 * hours * machine.device.flops)
        days = hours / found.devices / 24
        texts.append(f"{days:,.1f} days, {hours:,.0f} device hours, ${hours * price:,.0f}, {used:.0%} of the peak")
    return f"{tokens:.3g} tokens with the first, at ${price:g} an hour: {texts[0]}; at worst {texts[1]}."


if __name__ == "__main__":
    sys.exit(main())
