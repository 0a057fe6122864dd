#!/usr/bin/env bash
# Packs the libraries as `cargo publish` does, unpacks them in an empty folder, and tests the packed files there: the
# unit tests, the recorded connections, the examples of the documentation, and the programs of the README.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
readme=$PWD/README.md
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
packages=(rdma-transport rdma-transport-embedded rdma-transport-verbs rdma-reactor)
for package in transport transport/embedded transport/verbs reactor; do
    for file in LICENSE-MIT LICENSE-APACHE README.md; do
        [ -e "$package/$file" ] || { echo "package.sh: $package/$file is missing: it has to be in the package" >&2; exit 1; }
    done
done
"$cargo" package --allow-dirty --no-verify "${packages[@]/#/-p}"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for package in "${packages[@]}"; do
    tar -xzf "target/package/$package-$version.crate" -C "$folder"
done
# The packed libraries request each other from the registry, which does not have them yet.
mkdir "$folder/.cargo"
cat > "$folder/.cargo/config.toml" <<EOF
[patch.crates-io]
EOF
for package in "${packages[@]}"; do
    echo "$package = { path = \"$folder/$package-$version\" }" >> "$folder/.cargo/config.toml"
done
export CARGO_TARGET_DIR=$PWD/target/package/check
for package in "${packages[@]}"; do
    (cd "$folder/$package-$version" && timeout 900 "$cargo" test --lib)
done
(cd "$folder/rdma-transport-$version" && timeout 300 "$cargo" test --doc)
# One of the README's programs needs tokio.
(cd "$folder/rdma-reactor-$version" && timeout 300 "$cargo" test --doc --features tokio)

# What the README says of the costs: a program of a user, with the default features and the default
# settings of cargo for releases. The time is only printed.
crates=$("$cargo" tree -p rdma-reactor -e normal,build --prefix none --no-dedupe | awk '!/^rdma-/ { print $1, $2 }' | sort -u | wc -l)
mkdir -p "$folder/echo/src"
cp examples/src/bin/01-echo.rs "$folder/echo/src/main.rs"
cat > "$folder/echo/Cargo.toml" <<EOF
[package]
name = "echo"
edition = "2024"
[dependencies]
rdma-reactor = { path = "../rdma-reactor-$version" }
EOF
cd "$folder/echo"
rm -rf "$CARGO_TARGET_DIR/release"
TIMEFORMAT="package.sh: %U s of processor time to build 01-echo and its dependencies"
time timeout 900 "$cargo" build --release
timeout 60 "$CARGO_TARGET_DIR/release/echo"
mebibytes=$(stat -c %s "$CARGO_TARGET_DIR/release/echo" | awk '{ printf "%.1f", $1 / 1048576 }')
for figure in "$crates crates" "\`01-echo\` is $mebibytes MiB"; do
    grep -qF "$figure" "$readme" || { echo "package.sh: README.md does not say \"$figure\"" >&2; exit 1; }
done
