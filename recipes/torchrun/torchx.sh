#!/bin/bash
# torchx (pip install torchx): the same job here, on SLURM or on Kubernetes. Change: SCHEDULER (local_cwd, slurm,
# kubernetes, ...), HOSTSxRANKS, and what follows the double dash.
set -eu
SCHEDULER=${SCHEDULER:-local_cwd}
SHAPE=${SHAPE:-1x2}
exec torchx run --scheduler "$SCHEDULER" dist.ddp -j "$SHAPE" --max_retries 3 \
    --env OMP_NUM_THREADS=1,TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 -m lightning_pardist -- \
    fit -c recipes/gpt/config.yaml --trainer.strategy pardist_zero2 \
    --trainer.devices "${SHAPE#*x}" --trainer.num_nodes "${SHAPE%x*}"
