#!/bin/bash
# One run on nodes that Slurm gives: the first trains and has the driver, the others roll out. The recipe needs
# `autoscaling: true`, with which a job waits until all nodes have joined.
#
#   sbatch --nodes=3 deploy/slurm.sh jobs/recipes/gpu-multinode.yaml --name trial --runs-dir /shared/runs
#
# The same command again continues the run; so does Slurm, when a node failed (--requeue).
#SBATCH --job-name=raypost
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --requeue
#SBATCH --open-mode=append
# Two minutes before the time is over the run saves and reports.
#SBATCH --signal=B:TERM@120
set -euo pipefail

if [ "$#" -lt 1 ]; then
  echo "usage: sbatch --nodes=N deploy/slurm.sh RECIPE.yaml [options of jobs.train]" >&2
  exit 2
fi
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
head_ip=$(hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 10000))
export head_ip port
# A token of this job's own keeps others on the network out.
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | sha256sum | cut -c 1-64)
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c '
  role=$([ "$SLURM_NODEID" -eq 0 ] && echo trainer || echo rollout)
  options=(--resources "{\"$role\": ${SLURM_GPUS_ON_NODE:-8}}" --block)
  if [ "$SLURM_NODEID" -eq 0 ]; then
    exec ray start --head --node-ip-address "$head_ip" --port "$port" --dashboard-host 127.0.0.1 "${options[@]}"
  fi
  for _ in $(seq 150); do
    (: <"/dev/tcp/$head_ip/$port") 2>/dev/null && break
    sleep 2
  done
  exec ray start --address "$head_ip:$port" "${options[@]}"
' &
nodes=$!
for _ in $(seq 150); do
  if (: <"/dev/tcp/$head_ip/$port") 2>/dev/null; then break; fi
  kill -0 "$nodes" || { echo "raypost: Ray did not start; its log is above" >&2; exit 1; }
  sleep 2
done

RAY_ADDRESS="$head_ip:$port" python -m jobs.train --config "$@" &
driver=$!
code=0 stopping=
trap 'stopping=yes; kill -TERM "$driver"' TERM INT
wait "$driver" || code=$?
if [ -n "$stopping" ]; then # the signal ended the wait, not the driver, which saves now
  code=0
  wait "$driver" || code=$?
fi
kill -TERM "$nodes" 2>/dev/null || true
exit "$code"
