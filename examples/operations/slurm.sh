#!/bin/bash
# Trains on several machines of a Slurm cluster without Ray: sbatch examples/operations/slurm.sh X.yaml [--set KEY=VALUE, ...]
# Submit it from a checkout, on storage that all machines share, as the run's output_dir must be. ACCELERATE names another
# configuration of accelerate, such as configs/accelerate/fsdp2.yaml; its numbers of machines and processes are set here.
#SBATCH --job-name=maporl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
# Five minutes before its time is over, Slurm sends SIGTERM to the processes: the run saves the last whole update, and ends
# with status 143. The job is then queued again, and goes on from there.
set -uo pipefail
config=${1:?give a configuration: sbatch examples/operations/slurm.sh X.yaml}
shift
accelerate=${ACCELERATE:-configs/accelerate/multi_gpu.yaml}
each=${SLURM_GPUS_ON_NODE:-1}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
words=(--config "$config" "$@")
((${SLURM_RESTART_COUNT:-0} > 0)) && words+=(--resume)
export DO_NOT_TRACK=1 WANDB_ERROR_REPORTING=false

# A task knows its own SLURM_NODEID, and whether it was told to end, of which the status of the launcher says nothing.
task='trap "stopped=143" TERM
accelerate launch --config_file "$1" --num_machines "$2" --num_processes "$3" --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$4" --main_process_port "$5" train_multi_agent.py "${@:6}"
status=$?
exit "${stopped:-$status}"'
srun --kill-on-bad-exit=0 bash -c "$task" task "$accelerate" "$SLURM_JOB_NUM_NODES" "$((SLURM_JOB_NUM_NODES * each))" \
    "$address" "$((20000 + SLURM_JOB_ID % 10000))" "${words[@]}"
status=$?
if ((status == 143)); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
