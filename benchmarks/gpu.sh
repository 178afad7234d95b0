#!/usr/bin/env bash
# Every GPU check and figure in one call; logs and figures go to $OUT. fla-core is compared with if it is importable.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks/results}
export PYTHONPATH=.:${PYTHONPATH:-} PYTHONUNBUFFERED=1 FLA_CACHE_RESULTS=0
python3 benchmarks/warm_fla.py --workers "${WORKERS:-8}" > "$OUT/warm_fla.log" 2>&1 &
warm=$!
tests=${TESTS:-tests/test_gpu.py tests/test_contract.py}
# shellcheck disable=SC2086  # several files
timeout "${TEST_SECONDS:-600}" python3 -m pytest -c /dev/null --rootdir . -m gpu $tests -n "${WORKERS:-8}" -v -p no:cacheprovider > "$OUT/gpu_tests.log" 2>&1
status=$?
grep -E "FAILED|ERROR|^E  |passed|failed" "$OUT/gpu_tests.log" | tail -n 40
wait "$warm"
tail -n 2 "$OUT/warm_fla.log"
timeout "${BENCH_SECONDS:-600}" python3 benchmarks/kda.py --json "$OUT/kda_h200.json" 2>&1 | tail -n 8
exit "$status"
