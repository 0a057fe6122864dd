# To be sourced: builds test programs in which `PLANTED=NAME` plants a defect, and runs them. No defect needs a separate
# build, except for `layout`.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
cargo=${CARGO:-cargo}
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}/mutants" CARGO_PROFILE_TEST_DEBUG=0
mkdir -p "$CARGO_TARGET_DIR"
log=$CARGO_TARGET_DIR/log
# The numbers of random worlds; loom's models, with which three preemptions find each defect.
export SIM_SEEDS=${MUTANT_WORLDS:-1000} AIO_WORLDS=10000 CALL_WORLDS=10000 TRANSFER_WORLDS=10000
export LOOM_MAX_PREEMPTIONS=3
# The histories that a defect breaks must not get into the files of those that once failed.
export PROPTEST_DISABLE_FAILURE_PERSISTENCE=1

# Rows of the table: | `name` | effect | finder | becomes name=finder.
rows=$(sed -n '/^| defect /,/^$/p' docs/testing.md | sed -nE 's/^\| `([^`]+)` \|.*\| ([^|]+) \|$/\1=\2/p' | tr -d '`')
defects=$(cut -d = -f 1 <<<"$rows")

known() { # NAME...: fails if one of them is not in the table
    local name
    for name in "$@"; do
        grep -qxF -- "$name" <<<"$defects" && continue
        echo "$0: no defect is called \"$name\"; there are:" $defects >&2
        exit 1
    done
}

# Builds programs, and adds a line for each to `built`: its name, the folder of its package, the file. A name with `loom/`
# is that of a library whose threads are those of the model checker.
built=
build() { # PROGRAM...
    local program targets=() loom=()
    for program in "$@"; do
        case $program in
            loom/*) loom=(-p rdma-transport-embedded -p rdma-reactor --lib) ;;
            rdma_transport | rdma_transport_* | rdma_reactor) targets+=(--lib) ;;
            *) targets+=(--test "$program") ;;
        esac
    done
    [ ${#targets[@]} = 0 ] || compile "" "" "${targets[@]}"
    [ ${#loom[@]} = 0 ] || compile loom/ "--cfg loom_model" "${loom[@]}"
}

compile() { # PREFIX FLAGS ARGUMENT...: of cargo test
    local prefix=$1 flags=$2 messages
    shift 2
    messages=$(RUSTFLAGS="--cfg plantable $flags" "$cargo" test -q --target-dir "$CARGO_TARGET_DIR/$prefix" "$@" --no-run \
        --message-format=json-render-diagnostics)
    built+=$(sed -nE "s|.*\"manifest_path\":\"([^\"]*)/Cargo.toml\".*\"name\":\"([^\"]+)\".*\"executable\":\"([^\"]+)\".*|$prefix\2 \1 \3|p" \
        <<<"$messages")$'\n'
}

# Runs a program, or those of its tests whose name contains FILTER. Its exit status is the result, and the log has its output.
run() { # SECONDS DEFECT PROGRAM [FILTER]: DEFECT may be empty
    local folder file
    read -r folder file < <(awk -v name="$3" '$1 == name { print $2, $3 }' <<<"$built")
    (cd "$folder" && PLANTED=$2 timeout "$1" "$file" ${4:+"$4"}) >"$log" 2>&1
}

# The names of the tests that failed in the last run, at most three. A run that took too long or died has its finished tests only.
failed() {
    sed -nE 's/^test (.*) \.\.\. FAILED$/\1/p' "$log" | sort -u | head -n 3 | paste -sd ' '
}
