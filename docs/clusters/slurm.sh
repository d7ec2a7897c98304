#!/bin/bash
# One job, one run: sbatch slurm.sh RECIPE.yaml [KEY=VALUE ...]
#SBATCH --job-name=nemo-rl-mcore
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --requeue
set -euo pipefail

# The first machine has Ray's head and the driver. Its address, not its name: /etc/hosts may give the name to the loopback.
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
ip=$(srun --nodes=1 --ntasks=1 --nodelist="${machines[0]}" hostname --ip-address)
export RAY_ADDRESS="${ip%% *}:6379"
export RAY_USAGE_STATS_ENABLED=0
# Ray's head listens where other jobs can reach it; whoever has no token of this job is refused.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(openssl rand -hex 32)

# Ray is started on each machine, the command runs on the first one, and Ray is stopped: every process of Ray that the
# machine has, also those of others, so that --exclusive above has to stay. A quarter of an hour is left
# for the last save: the SIGTERM at the end of the job reaches Ray's own servers too, and nothing can be saved then.
srun ray symmetric-run --address "$RAY_ADDRESS" --min-nodes "$SLURM_JOB_NUM_NODES" --num-gpus 8 -- \
  nemo-rl-mcore grpo --config "$@" \
  cluster.num_nodes="$SLURM_JOB_NUM_NODES" cluster.gpus_per_node=8 \
  checkpointing.enabled=true 'checkpointing.checkpoint_must_save_by="00:03:45:00"'
