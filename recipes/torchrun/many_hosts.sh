#!/bin/bash
# Several hosts: run this on each. Change: FIRST (a host that all reach by that name), HOSTS, RANKS, and TRAIN.
# HOSTS may be a range, as 1:4: hosts may leave and come back, and after each change training goes on from the newest
# checkpoint with those that are there; --trainer.num_nodes is then the largest number. With
# --trainer.callbacks=lightning_pardist.GlobalBatchSize --trainer.callbacks.global_batch_size=N steps stay the same.
# A job that loses FIRST, which holds torchrun's own store, ends, and goes on when it is started again with resume=always.
set -eu
FIRST=${FIRST:?set FIRST to the name of one host, the same on all}
HOSTS=${HOSTS:-2}
RANKS=${RANKS:-2}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Where hosts have several networks, name the right one:
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
TRAIN=${TRAIN:-"-m lightning_pardist fit -c recipes/gpt/config.yaml --trainer.strategy pardist_zero2
    --trainer.devices $RANKS --trainer.num_nodes ${HOSTS#*:} --trainer.default_root_dir runs/train"}

# join_timeout bounds the wait for a host that does not come back.
exec torchrun --nnodes="$HOSTS" --nproc-per-node="$RANKS" --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-endpoint="$FIRST:29400" --rdzv-id=train --rdzv-conf=join_timeout=300 $TRAIN
