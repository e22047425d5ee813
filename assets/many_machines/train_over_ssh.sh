#!/bin/bash
# ./train_over_ssh.sh 10.0.0.1 10.0.0.2: trains on these hosts. Run it again to go on from the last checkpoint.
# The same folder must be on all hosts, shared, with .venv in it. RANKS is the number of ranks on each (default: its GPUs).
# Ctrl-C, or a lost connection, ends the ranks there without a save: run it in tmux or screen.

set -eu
hosts=("$@")
run=$(date +%s)
agents=()
trap 'kill "${agents[@]}" 2>/dev/null || true' EXIT  # the ranks there end too, thanks to ssh -tt

for number in "${!hosts[@]}"; do
    ssh -tt "${hosts[number]}" "cd '$PWD' && . .venv/bin/activate && TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 exec torchrun \
        --nnodes 1:${#hosts[@]} --nproc-per-node ${RANKS:-gpu} --max-restarts 20 \
        --rdzv-backend c10d --rdzv-id $run --rdzv-endpoint ${hosts[0]}:29500 \
        --rdzv-conf is_host=$((number == 0)) --local-addr ${hosts[number]} \
        -m scratch_ddp.training --strategy bucketed --checkpoints run1 --every 50 --timeout 60" < /dev/null &
    agents+=($!)
done
status=0
for agent in "${agents[@]}"; do wait "$agent" || status=1; done
exit $status
