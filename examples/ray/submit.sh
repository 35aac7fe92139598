#!/bin/bash
# Submits a run to a Ray cluster that has a dashboard: examples/ray/submit.sh https://HEAD:8265 X.yaml [--resume, --set KEY=VALUE, ...]
# X.yaml and the run's output_dir are paths on the cluster's machines. Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH before, here
# and where the cluster was started. It needs pip install "ray[default]".
set -euo pipefail
dashboard=${1:?give the address of the dashboard, such as http://127.0.0.1:8265}
config=${2:?give a configuration}
shift 2
[[ ${RAY_AUTH_MODE:-} == token ]] || { echo "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH" >&2; exit 2; }
exec ray job submit --address "$dashboard" -- maporl train "$config" --backend ray --set cluster.address=auto "$@"
