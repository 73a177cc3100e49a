#!/usr/bin/env bash
# fuzz.sh SECONDS: run every fuzz target from its corpus in tests/fuzz/corpus, SECONDS of processor time in all. What
# crashes one is left in build/fuzz/crashes and is run again first the next time.
set -euo pipefail
cd "$(dirname "$0")/../.."
shopt -s nullglob
packaging/setup/native.sh asan fuzz

targets=(build/asan/fuzz/fuzz_*)
each=$(( ($1 + ${#targets[@]} - 1) / ${#targets[@]} ))
fuzz() {
  local name="${1##*/fuzz_}"
  local found="build/fuzz/found/$name" crashes="build/fuzz/crashes/$name" log="build/fuzz/$name.log"
  mkdir -p "$found" "$crashes"
  local before=("$crashes"/*)
  { ((${#before[@]} == 0)) || "$1" -runs=1 "${before[@]}"; } >"$log" 2>&1 &&
    "$1" -max_total_time="$each" -timeout=10 -rss_limit_mb=2048 -artifact_prefix="$crashes/" -print_final_stats=1 \
      "$found" "tests/fuzz/corpus/$name" >>"$log" 2>&1 || {
    tail -n 60 "$log" >&2
    echo "$name failed; the input is in $crashes" >&2
    return 1
  }
  echo "$name, $each s: $(grep -E 'stat::number_of_executed_units|DONE' "$log" | tr -s '\n\t ' ' ')"
}

# As many at a time as there are processors, each for as long as if it were alone.
export each
export -f fuzz
printf '%s\n' "${targets[@]}" | xargs --max-procs "$(nproc)" -I{} bash -euo pipefail -O nullglob -c 'fuzz {}'
