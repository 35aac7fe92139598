#!/bin/bash
# Trains on several machines of a Slurm cluster: sbatch examples/ray/slurm.sh configs/ppo/X.yaml [--resume, --set KEY=VALUE, ...]
# Give the machines and their accelerators here, or to sbatch. The folder that you submit from and the run's output_dir must be on
# storage that all machines share.
#SBATCH --job-name=maporl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
set -euo pipefail
config=${1:?give a configuration: sbatch examples/ray/slurm.sh X.yaml}
shift

# whoever has the token can run programs on these machines, so that only you may read its file
umask 077
folder=$(mktemp -d "$PWD/.ray-$SLURM_JOB_ID-XXXXXX")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$folder/token" RAY_USAGE_STATS_ENABLED=0
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH"

mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
count=${#machines[@]}
on_head=(srun --overlap --nodes=1 --ntasks=1 --nodelist="${machines[0]}")

address=$("${on_head[@]}" hostname --ip-address | awk '{print $1}')
export RAY_ADDRESS="$address:$((20000 + SLURM_JOB_ID % 10000))"
started=()
cleanup() {
    kill "${started[@]}" 2> /dev/null || true
    wait
    rm -rf "$folder"
}
trap cleanup EXIT
"${on_head[@]}" ray start --head --node-ip-address="$address" --port="${RAY_ADDRESS##*:}" --include-dashboard=false --block &
started+=($!)
if ((count > 1)); then
    srun --overlap --nodes=$((count - 1)) --ntasks=$((count - 1)) --nodelist="$(IFS=, && echo "${machines[*]:1}")" \
        ray start --address="$RAY_ADDRESS" --block &
    started+=($!)
fi

# a run that begins before all machines are there is refused, because its groups do not fit
"${on_head[@]}" python - "$count" << 'WAIT'
import sys
import time

import ray

wanted, until = int(sys.argv[1]), time.monotonic() + 300
found = 0
while found < wanted:
    try:
        ray.init(log_to_driver=False)  # at RAY_ADDRESS
        found = sum(node["Alive"] for node in ray.nodes())
        ray.shutdown()
    except ConnectionError:
        pass  # the head is starting
    if found < wanted and time.monotonic() > until:
        sys.exit(f"{found} of {wanted} machines have joined within 300 s")
    time.sleep(2)
WAIT
"${on_head[@]}" maporl train "$config" --backend ray --set cluster.address=auto "$@"
