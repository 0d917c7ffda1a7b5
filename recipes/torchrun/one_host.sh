#!/bin/bash
# One host; ranks are restarted when one fails, and go on from the newest checkpoint. Change: RANKS, and TRAIN.
set -eu
RANKS=${RANKS:-2}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
TRAIN=${TRAIN:-"-m lightning_pardist fit -c recipes/gpt/config.yaml --trainer.strategy pardist_zero2
    --trainer.devices $RANKS"}

exec torchrun --standalone --nproc-per-node="$RANKS" --max-restarts=3 $TRAIN
