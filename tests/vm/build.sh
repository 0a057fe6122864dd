#!/usr/bin/env bash
# build.sh NAME...: builds the tests and programs for the guest, and prints their paths, one per line, in this order. The features are those
# of `make test` on the host: a build of fewer packages would have other features of the dependencies, and build the libraries once more.
# With BINDING=rdma-sys the tests of devices are linked with the libraries of RDMA instead of loading them.
#
# build.sh --release PROGRAM...: the same for programs as their users build them.
set -euo pipefail
cd "$(dirname "$0")/../.."
command=(test --no-run)
if [ "${1:-}" = --release ]; then
    shift
    command=(build --release) what=(-p rdma-reactor-tools "${@/#/--bin=}")
elif [ -n "${BINDING:-}" ]; then
    what=(-p rdma-transport-verbs -p rdma-reactor-tests --features "$BINDING" "${@/#/--test=}")
else
    # The requested tests; and conformance and kv, which also build the programs of their packages.
    what=(--workspace --test conformance --test kv)
    for name in "$@"; do
        # rdma_faults is a test, rdma-peer a program.
        case $name in verbs | rdma | rdma_* | *_siw) what+=(--test "$name") ;; esac
    done
fi
made=$("${CARGO:-cargo}" "${command[@]}" --message-format=json "${what[@]}")
for name in "$@"; do
    # Programs are in a directory that tests are not in: kv is both.
    for kind in bin test; do
        [ $kind = bin ] && file=$name || file=$name-[0-9a-f]*
        path=$(sed -n "/\"kind\":\[\"$kind\"\]/s/.*\"executable\":\"\([^\"]*\/$file\)\".*/\1/p" <<<"$made")
        [ -z "$path" ] || break
    done
    [ "$(wc -w <<<"$path")" = 1 ] || { echo "build.sh: one $name was to be built, not: $path" >&2; exit 1; }
    echo "$path"
done
