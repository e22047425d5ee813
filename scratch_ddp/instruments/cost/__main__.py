"""What training a model takes, from its config.json, without its weights: memory, the best layouts, days, money.

Times are for devices that reach 36 to 62 % of their peak while they compute. Against published trainings: Megatron-LM's
GPT of 7.5 to 1,008 billion parameters and Llama 3 405B are within 11 % of the forecast at 55 %; torchtitan's Llama 3
8B, on H100 of 500 W, is 21 to 34 % slower, and its memory within 5 %. Not in the forecast: software that sends slower
than the network (ZeRO-3 of 2021 on 1,536 A100 took four times as long), context and expert parallelism, fused kernels,
which save less (with them Llama 3 405B takes 80 GB in place of 129).
"""

import argparse
import sys
from pathlib import Path

from scratch_ddp.instruments.cost.models import flops_per_token, from_config
from scratch_ddp.instruments.cost.plan import plan
from scratch_ddp.instruments.cost.published import MODELS
from scratch_ddp.instruments.cost.wire import CLUSTERS
from scratch_ddp.instruments.sizes import count


def main(arguments: list[str] | None = None) -> int:
    """Print the tables. Return the exit status: 1 if no layout fits."""
    parser = argparse.ArgumentParser(prog="python -m scratch_ddp.instruments.cost", description=__doc__)
    parser.add_argument("--model", required=True, help=f"a config.json of transformers, or one of {', '.join(MODELS)}")
    parser.add_argument("--gpus", type=count, required=True, help="number of devices")
    parser.add_argument("--gpu", choices=CLUSTERS, default="H100", help="kind of device (H100)")
    parser.add_argument("--batch", type=count, default=512, help="sequences in a step, on all devices together (512)")
    parser.add_argument("--sequence", type=count, default=4096, help="tokens of a sequence (4096)")
    parser.add_argument("--tokens", type=float, default=1e12, help="of the whole training (1e12)")
    options = parser.parse_args(arguments)
    if options.model not in MODELS and not Path(options.model).exists():
        parser.error(f"there is no file {options.model!r}, and no such model; there are {', '.join(MODELS)}")
    try:
        shape, cluster = MODELS.get(options.model) or from_config(options.model), CLUSTERS[options.gpu]
    except ValueError as error:
        parser.error(str(error))
    flops = flops_per_token(shape, options.sequence)
    active = f", {shape.active_parameters:,} active" if shape.idle else ""
    print(f"{shape.name}: {shape.parameters:,} parameters{active}, {flops / 1e9:,.1f} GFLOP a token")
    if shape.idle:
        print("The layouts of a mixture of experts are not forecast.")
        return 1
    found = plan(shape, cluster, options.gpus, options.batch, options.sequence)
    print(f"\n{options.gpus} {options.gpu}, {options.batch} sequences of {options.sequence} tokens a step:")
    print(found.table())
    if not found.best:
        return 1
    steps, price, texts = options.tokens / (options.batch * options.sequence), cluster.device.price, []
    for seconds in (found.best[0].time.total, found.best[0].slow.total):
        hours = steps * seconds * options.gpus / 3600
        used = flops * options.tokens / (3600 * hours * cluster.device.flops)
        days = hours / options.gpus / 24
        texts.append(f"{days:,.1f} days, {hours:,.0f} device hours, ${hours * price:,.0f}, {used:.0%} of the peak")
    print(f"\n{options.tokens:.3g} tokens with the first, at ${price:g} an hour: {texts[0]}; at worst {texts[1]}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
