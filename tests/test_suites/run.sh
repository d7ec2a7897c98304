#!/bin/bash
# Run the scripts of suites one after the other: run.sh [--dry-run] SUITE... [-- OVERRIDE...]
#
# A suite is a file beside this one, such as nightly_cpu.txt. The overrides, such as seed=1, go to every recipe. Exit
# status 1 when a script fails. llm/common.env says what may be set in the environment; results go to a new folder.
set -euo pipefail

SUITES_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
PROJECT_ROOT=$(cd -- "$SUITES_DIR/../.." && pwd)
export RESULTS_DIR=${RESULTS_DIR:-$PROJECT_ROOT/results/test_suites/$(date +%Y%m%d-%H%M%S)}

suites=()
while (($#)); do
  case $1 in
    --dry-run) export TEST_DRYRUN=1 ;;
    --) shift && break ;;
    -*) echo "run.sh: unknown option $1" >&2 && exit 2 ;;
    *) suites+=("$SUITES_DIR/$(basename -- "$1")") ;;
  esac
  shift
done
scripts=$(sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "${suites[@]:?name a suite, such as nightly_cpu.txt}")
[[ -n $scripts ]] || { echo "run.sh: no scripts in ${suites[*]}" >&2 && exit 2; }

summary=() failed=0
for script in $scripts; do
  began=$SECONDS verdict=pass
  bash "$PROJECT_ROOT/$script" "$@" || verdict="FAIL (exit status $?)"
  [[ $verdict == pass ]] || failed=$((failed + 1))
  summary+=("$(printf '%5d s  %s  %s' $((SECONDS - began)) "$(basename -- "$script" .sh)" "$verdict")")
done

printf '\n'
printf '%s\n' "${summary[@]}"
printf '%d of %d failed\n' "$failed" "${#summary[@]}"
((failed == 0))
