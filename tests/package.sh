#!/usr/bin/env bash
# Packs the libraries as `cargo publish` does, unpacks them in an empty folder, and tests the packed files there: the
# unit tests, the recorded connections, the examples of the documentation, and the programs of the README.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
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
