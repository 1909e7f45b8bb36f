#!/bin/bash
# Train on several machines under Slurm: sbatch run/slurm.sh --deepspeed_config ds_configs/zero3.json --output_dir ...
# All flags go to run/train.py. Adapt the next lines to your cluster; docs/machines.md explains them.
#
# One task per GPU; every task sees all GPUs of its machine and uses its own.
#SBATCH --job-name=llava_ds
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
# A rank and its --dataloader_num_workers.
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# Two minutes before the time limit, every rank is signalled to save (if saving takes longer, raise the number). Then, and
# when a machine fails, the job is requeued, and resumes from its newest whole checkpoint.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
PYTHON="${PYTHON:-.venv/bin/python}"

# Minutes that a rank waits for the others, at the start and in every collective.
export DEEPSPEED_TIMEOUT="${DEEPSPEED_TIMEOUT:-30}"
# Compiled operators of DeepSpeed: a folder on each machine, because network disks lose locks.
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-${TMPDIR:-/tmp}/torch_extensions_$(id -u)}"
# If machines have several networks, name the fast one for both:
#   export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# srun does not inherit cpus-per-task.
code=0
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "$PYTHON" -u run/train.py "$@" || code=$?

# 75: it was asked to stop, and saved a checkpoint to resume from; 79 is the same without one (docs/checkpoints.md).
# scancel ends this script before this line.
if [ "$code" -eq 75 ]; then
    echo "saved: job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
