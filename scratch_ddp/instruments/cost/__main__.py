"""What training a model takes, from its config.json, without its weights: memory, the best layouts, days, money.

Times are for devices that reach 38 to 62 % of their peak while they compute. Against published trainings: Megatron-LM's
GPT of 7.5 to 1,008 billion parameters and Llama 3 405B are within 11 % of the forecast at 55 %; torchtitan's Llama 3 8B
reaches 33 to 39 %, on H100 of 500 W. Not in the forecast: software that sends slower than the network (ZeRO-3 of 2021
on 1,536 A100 took four times as long), context and expert parallelism, fused kernels (Llama 3's ranks had two thirds).
"""

import argparse
import sys
from pathlib import Path

from scratch_ddp.instruments.cost.models import flops_per_token, from_config
from scratch_ddp.instruments.cost.plan import plan
from scratch_ddp.instruments.cost.published import MODELS, model
from scratch_ddp.instruments.cost.states import MIXED, STAGES, WIDE_GRADIENTS, model_states
from scratch_ddp.instruments.cost.wire import CLUSTERS, Cluster
from scratch_ddp.instruments.sizes import count


def main(arguments: list[str] | None = None) -> int:
    """Print the tables. Return the exit status: 1 if no layout fits, 2 for input that can't be."""
    parser = argparse.ArgumentParser(prog="python -m scratch_ddp.instruments.cost", description=__doc__)
    parser.add_argument("--model", required=True, help=f"a config.json of transformers, or one of {', '.join(MODELS)}")
    parser.add_argument("--gpus", type=count, required=True, help="number of devices")
    parser.add_argument("--gpu", choices=CLUSTERS, default="H100", help="kind of device (H100)")
    parser.add_argument("--batch", type=count, default=512, help="sequences in a step, on all devices together (512)")
    parser.add_argument("--sequence", type=count, default=4096, help="tokens of a sequence (4096)")
    parser.add_argument("--tokens", type=float, default=1e12, help="of the whole training (1e12)")
    parser.add_argument("--price", type=float, help="dollars for an hour of a device")
    parser.add_argument("--wide-gradients", action="store_true", help="gradients are held and sent in float32")
    options = parser.parse_args(arguments)
    try:
        return _print(options, CLUSTERS[options.gpu])
    except ValueError as error:
        print(f"cost: {error}", file=sys.stderr)
        return 2


def _print(options: argparse.Namespace, cluster: Cluster) -> int:
    precision = WIDE_GRADIENTS if options.wide_gradients else MIXED
    shape = from_config(options.model) if Path(options.model).exists() else model(options.model)
    flops = flops_per_token(shape, options.sequence)
    more = f", {shape.active_parameters:,} active" if shape.idle else ""
    more += f", {shape.beside:,} of them beside the text model" if shape.beside > 0.01 * shape.parameters else ""
    print(f"{shape.name}: {shape.parameters:,} parameters{more}, {flops / 1e9:,.1f} GFLOP a token", end="\n\n")
    print("GB of a rank     weights  gradients    master  optimizer     total")
    for stage in STAGES:
        held = model_states(shape.parameters, options.gpus, stage, precision)
        parts = (held.weights, held.gradients, held.master, held.optimizer, held.total)
        print(f"{stage:14}" + "".join(f"{part / 1e9:10,.1f}" for part in parts))
    found = plan(shape, cluster, options.gpus, options.batch, options.sequence, precision=precision)
    print(f"\n{options.gpus} {options.gpu}, {options.batch} sequences of {options.sequence} tokens a step:")
    print(found.table())
    if not found.best:
        return 1
    price = cluster.device.price if options.price is None else options.price
    steps, texts = options.tokens / (options.batch * options.sequence), []
    for seconds in (found.best[0].time.total, found.best[0].slow.total):
        hours = steps * seconds * options.gpus / 3600
        used = flops * options.tokens / (3600 * hours * cluster.device.flops)
        days = hours / options.gpus / 24
        texts.append(f"{days:,.1f} days, {hours:,.0f} device hours, ${hours * price:,.0f}, {used:.0%} of the peak")
    print(f"\n{options.tokens:.3g} tokens with the first, at ${price:g} an hour: {texts[0]}; at worst {texts[1]}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
