#!/bin/bash
# Two machines of eight GPUs under SLURM. One task a machine starts accelerate, which starts one process a GPU.
#   sbatch train/configs/slurm.sh debias-l14 --data sharegpt4v.json --image-root data --output runs/l14 --precision bf16
# Five minutes before the time limit SLURM tells this shell, which tells the run; the run saves a checkpoint and ends, and the
# job goes back into the queue to go on from it. A run that ends in an error is not put back. Where there is no checkpoint
# yet, --resume starts from the beginning, so the first start needs no other line.
#SBATCH --job-name=debias
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --output=slurm-%j.out
set -euo pipefail

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))

stopped=0
trap 'stopped=1; kill -TERM "$run"' TERM

# srun starts a shell on every machine: SLURM_NODEID is known there, not here.
srun bash -c 'exec accelerate launch --config_file train/configs/two_machines.yaml \
  --num_machines "$SLURM_NNODES" --num_processes $((SLURM_NNODES * 8)) \
  --machine_rank "$SLURM_NODEID" --main_process_ip "$0" --main_process_port "$1" \
  train/encoder.py "${@:2}" --resume' "$host" "$port" "$@" &
run=$!
status=0
wait "$run" || status=$?
if [ "$stopped" -eq 1 ]; then
  wait "$run" || true  # the first wait ended with the signal, not with the run
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
