#!/usr/bin/env bash
# The page of the heat map in a headless browser: the pointer moves to squares, and the text next to it is read back and
# compared with the figures of the JSON. One rank has TCP only, and the others share memory with each other.
. "$(dirname "$0")/lib.sh"

run_ranks() {
    local hosts=127.0.0.1,127.0.0.1,127.0.0.1,127.0.0.1,127.0.0.1 rank provider=iwarp
    rm -f "$out"/page.*
    for rank in 4 3 2 1; do
        timeout 900 "$mesh" --hosts $hosts --rank $rank --label "host<$rank>" "${quick[@]}" --provider $provider &
        provider=auto
    done
    timeout 900 "$mesh" --hosts $hosts --rank 0 --label 'host<0>' "${quick[@]}" --provider auto \
        --json "$out/page.json" --html "$out/page.html" && wait && whole page 5
}

hover() {
    timeout 900 python3 tests/cluster/hover.py "$out/page.html" "$out/page.json"
}

shown 'Page: five ranks' run_ranks
shown 'Page: the hover text of every square in a browser' hover
exit $failed
