
set -euo pipefail
export OMP_NUM_THREADS=1
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=$(hostname)
leaving= again= children=()

leave() {
  leaving=yes
  for child in "${children[@]}"; do
    kill -TERM "$child" 2>/dev/null || true
  done
}
trap leave TERM INT
# Slurm sends it before the job's time is over: the job waits for another turn, and goes on then.
trap 'again=yes; leave' USR1

# wait_for PID: its exit code, also where signals interrupt `wait`
wait_for() {
  local code known
  while :; do
    wait "$1" 2>/dev/null && return 0 || code=$?
    if [ "$code" -le 128 ] || ! kill -0 "$1" 2>/dev/null; then
      # It may have ended just after a signal had interrupted `wait`.
      wait "$1" 2>/dev/null && known=0 || known=$?
      [ "$known" = 127 ] || code=$known
      return "$code"
    fi
  done
}

# keep "CODES" COMMAND...: run a command, and again whenever it ends, until this shell is to leave; an end with one of these exit
# codes is final, and stops the job if it is not 0
keep() {
  local final=" $1 " code=0
  shift
  trap leave TERM
  trap : USR1
  until [ -n "$leaving" ]; do
    "$@" &
    children=("$!")
    code=0
    wait_for "$!" || code=$?
    if [ -z "$leaving" ] && [[ $final == *" $code "* ]]; then
      [ "$code" = 0 ] || kill -TERM "$$"
      break
    elif [ -z "$leaving" ]; then
      echo "relax: ${1##*/} ended with exit code $code and starts again" >&2
      sleep 2
    fi
  done
  exit "$code"
}

# The server takes a run's streams only from credentials that its keys signed: jobs of this run share the folder.
"$bin/relax" keys "$config" "$keys" "${settings[@]}" --host "$address" --listen "0.0.0.0:$port" --store "$store" --tls
(keep "" "$bin/nats-server" -c "$keys/server/nats-server.conf") &
broker=$!
joined=()
for node in "${!roles[@]}"; do
  options=()
  for role in ${roles[node]}; do
    options+=("--role=$role")
  done
  name=${hosts[node]}
  # 0: the run is over. 2: the node cannot work. All others, Slurm's and those of signals among them, may pass.
  (keep "0 2" srun --overlap --nodes=1 --ntasks=1 --nodelist="$name" --cpu-bind=none "$bin/relax" node "${options[@]}" \
    --broker "tls://$address:$port" --credentials "$keys" --store "$run_store" --name "$name") &
  joined+=($!)
done
(keep "0 1 2" "$bin/relax" up "$config" "${settings[@]}" "${up[@]}" --quiet --must-finish \
  broker.url="tls://$address:$port" broker.credentials="$keys") &
run=$!
children=("$run" "${joined[@]}")
code=0
wait_for "$run" || code=$?
leave
for child in "${joined[@]}"; do
  wait_for "$child" || true
done
kill -TERM "$broker"
wait_for "$broker" || true
if [ "$code" != 0 ] && [ -n "$again" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
