
set -euo pipefail
export OMP_NUM_THREADS=1
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=${RELAX_ADDRESS:-$(hostname)}
leaving='' again='' guard='' children=()

leave() {
  leaving=yes
  for child in "${children[@]}"; do
    kill -TERM "$child" 2>/dev/null || true
  done
}
trap leave TERM INT

newest() {
  [ ! -d "$checkpoints" ] || find "$checkpoints" -mindepth 1 -maxdepth 1 | sort -V | tail -n 1
}
before=$(newest)

# Puts the job back into the queue; not if that would end in the same steps again and again.
requeue() {
  if [ "$(newest)" = "$before" ]; then
    echo "relax: no checkpoint was written in this job; raise --time or lower trainer.checkpoint_every" >&2
  else
    scontrol requeue "$SLURM_JOB_ID"
  fi
}

# Slurm sends USR1 before the time limit: stop the run, and requeue the job, also if stopping takes too long.
on_time_limit() {
  again=yes
  (sleep "$stop_seconds" && requeue) &
  guard=$!
  leave
}
trap on_time_limit USR1

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

# keep NAME "CODES" COMMAND...: restart COMMAND whenever it exits, after a pause. An exit code in CODES is final, and 2, a
# configuration error, at the third time in a row: a shared file system may show files late. A final code but 0 stops the job.
keep() {
  local name=$1 final=" $2 " code=143 pause=1 refused=0 began
  shift 2
  trap leave TERM
  trap : USR1
  until [ -n "$leaving" ]; do
    began=$SECONDS
    "$@" &
    children=("$!")
    [ -z "$leaving" ] || leave
    code=0
    wait_for "${children[0]}" || code=$?
    [ -z "$leaving" ] || break
    [ "$code" = 2 ] && refused=$((refused + 1)) || refused=0
    if [[ $final == *" $code "* ]] || [ "$refused" = 3 ]; then
      [ "$code" = 0 ] || kill -TERM "$$"
      break
    fi
    [ $((SECONDS - began)) -lt 600 ] || pause=1
    [ "$refused" = 0 ] || pause=15
    echo "relax: $name exited with code $code and restarts in $pause s" >&2
    sleep "$pause" &
    children=("$!")
    [ -z "$leaving" ] || leave
    wait_for "${children[0]}" || true
    pause=$((pause < 30 ? 2 * pause : 60))
  done
  exit "$code"
}

# The server may take a while to read its streams.
await_broker() {
  for _ in {1..300}; do
    (exec 3<>"/dev/tcp/$address/$port") 2>/dev/null && return
    sleep 1
  done
  echo "relax: no broker on $address:$port within 300 s" >&2
  exit 3
}

start_run() {
  await_broker
  exec "$bin/relax" up "$config" "${settings[@]}" "${up[@]}" --quiet --must-finish \
    broker.url="tls://$address:$port" broker.credentials="$keys"
}

# start_node HOST ROLE=NUMBER...
start_node() {
  local host=$1 role options=()
  shift
  for role in "$@"; do
    options+=("--role=$role")
  done
  await_broker
  exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$host" --cpu-bind=none "$bin/relax" node "${options[@]}" --stay \
    --broker "tls://$address:$port" --credentials "$keys" --store "$run_store" --name "${host//[^A-Za-z0-9_-]/-}"
}

# Jobs of a run share the keys: the server opens the run's streams only to credentials that they signed.
"$bin/relax" keys "$config" "$keys" "${settings[@]}" --host "$address" --listen "0.0.0.0:$port" --store "$store" --tls --rotate
if [ -n "$leaving" ]; then
  [ -z "$again" ] || scontrol requeue "$SLURM_JOB_ID"
  exit 1
fi
(keep broker "" flock --no-fork "$keys/lock" "$bin/nats-server" -c "$keys/server/nats-server.conf") &
broker=$!
joined=()
for node in "${!roles[@]}"; do
  read -ra wanted <<<"${roles[node]}"
  (keep "node ${hosts[node]}" 0 start_node "${hosts[node]}" "${wanted[@]}") &
  joined+=($!)
done
(keep "relax up" "0 1" start_run) &
children=("$!")
[ -z "$leaving" ] || leave
code=0
wait_for "${children[0]}" || code=$?
if [ "$code" != 0 ] && [ -n "$again" ]; then
  requeue
fi
[ -z "$guard" ] || kill "$guard" 2>/dev/null || true
children=("${joined[@]}")
leave
for child in "${joined[@]}"; do
  wait_for "$child" || true
done
kill -TERM "$broker" 2>/dev/null || true
wait_for "$broker" || true
exit "$code"
