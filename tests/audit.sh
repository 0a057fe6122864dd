#!/usr/bin/env bash
# The crates that the project is built from: licences, sources and, if the database can be reached, advisories. Then the public API of both
# libraries against the newest release, if there is one.
#
#   audit.sh --changed     nothing if the crates are those of the last audit:
#                          tests/data/audited.txt has their sum
set -euo pipefail
cd "$(dirname "$0")/.."
audited=tests/data/audited.txt
sum=$(git ls-files '*Cargo.toml' Cargo.lock tests/deny.toml | xargs cat | sha256sum)
if [ "${1:-}" = --changed ] && [ "$sum" = "$(cat $audited)" ]; then
    echo "audit.sh: the crates are those of the last audit"
    exit
fi
tests/tools.sh cargo-deny
database=https://github.com/RustSec/advisory-db
check() { timeout 300 cargo deny --config tests/deny.toml check "$@"; }
check licenses bans sources
if timeout 20 git ls-remote -q "$database" HEAD > /dev/null 2>&1; then
    # Once more: the database may be unreachable for a moment.
    check advisories || { sleep 20 && check advisories; }
else
    echo "audit.sh: advisories are not checked, because $database cannot be reached"
fi
[ "$sum" = "$(cat $audited)" ] || { echo "$sum" >$audited && echo "audit.sh: commit $audited"; }

# BASELINE=REV compares with another revision, for use before the first release.
release=${BASELINE:-$(git describe --tags --abbrev=0 --match 'v[0-9]*' 2> /dev/null || true)}
if [ -z "$release" ]; then
    echo "audit.sh: the API is not compared, because no release has a tag; BASELINE=REV names a revision"
    exit
fi
tests/tools.sh cargo-semver-checks
timeout 1200 cargo semver-checks --baseline-rev "$release" -p rdma-transport -p rdma-transport-embedded -p rdma-transport-verbs -p rdma-reactor
