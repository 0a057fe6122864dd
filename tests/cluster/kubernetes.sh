#!/usr/bin/env bash
# Checks the manifests of examples/tools/cluster against the schemas of Kubernetes (the package kubernetes-validate). Runs their command
# line by hand: four ranks with the environment of an Indexed Job, in a namespace where the name of rank 0 is known.
. "$(dirname "$0")/lib.sh"

validate() { # FILE: strictly, so that a field that no version has is an error
    timeout 900 "$venv/bin/kubernetes-validate" --strict "$1" || return
    # A validator must reject a wrong field.
    sed 's/completionMode/completionMood/' "$1" >"$out/wrong.yaml"
    ! timeout 900 "$venv/bin/kubernetes-validate" --strict "$out/wrong.yaml"
}

# The words of the container's command line, one per line.
words() {
    "$venv/bin/python" - "$1" <<'P'
import sys, yaml
job = next(doc for doc in yaml.safe_load_all(open(sys.argv[1])) if doc["kind"] == "Job")
spec = job["spec"]
container = spec["template"]["spec"]["containers"][0]
args = container["args"]
assert spec["completions"] == spec["parallelism"] == int(args[args.index("--count") + 1]), "three numbers of ranks"
print(*container["command"], *args, sep="\n")
P
}

run() { # FILE
    local name=${1##*/} ranks=() status=0 all
    name=${name%.yaml}
    rm -f "$out/$name.json"
    mapfile -t all < <(words "$1")
    [ "${all[0]}" = rdma-mesh ] || return
    printf '%s ' "${all[@]}"; echo
    cat /etc/hosts >"$out/hosts" && echo '127.0.0.1 rdma-mesh-0.rdma-mesh' >>"$out/hosts"
    for rank in 3 2 1 0; do
        # Kubernetes replaces the variables in the words; the measurement is short.
        local line=("${all[@]//\$(NODE_NAME)/node-$rank}" "${quick[@]}")
        [ $rank = 0 ] && line+=(--json "$out/$name.json")
        # shellcheck disable=SC2016
        JOB_COMPLETION_INDEX=$rank PATH=${mesh%/*}:$PATH timeout 900 unshare --mount sh -c \
            'mount --bind "$0" /etc/hosts && exec "$@"' "$out/hosts" "${line[@]}" &
        ranks+=($!)
    done
    for rank in "${ranks[@]}"; do wait "$rank" || status=1; done
    [ $status = 0 ] && whole "$name" 4 node-0 node-1 node-2 node-3
}

for file in examples/tools/cluster/*.yaml; do
    shown "Kubernetes: the schema takes ${file##*/}" validate "$file"
    shown "Kubernetes: the command line of ${file##*/}" run "$file"
done
exit $failed
