#!/usr/bin/env bash
# Packs and tests the libraries, tags the version, and prints what a person must do to publish it. Uploads nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
value() { sed -n "s/^$1 = \"\(.*\)\"/\1/p" Cargo.toml | head -n 1; }
fail() { echo "publish.sh: $*" >&2; exit 1; }
version=$(value version) repository=$(value repository)
[ -n "$repository" ] || fail "\`repository\` in Cargo.toml is empty: write the address of the repository there"
clean() { [ -z "$(git status --porcelain)" ] || fail "files are changed or new: commit them, so that the tag has what is published"; }
clean
commit=$(git rev-parse HEAD)
[ "$(grep -c "path = .*version = \"$version\"" Cargo.toml)" = 4 ] || fail "the four libraries in Cargo.toml do not all have the version $version"
grep -q "^## \[$version\]" CHANGELOG.md || fail "CHANGELOG.md has no section [$version]"
tagged=$(git rev-parse -q --verify "refs/tags/v$version^{commit}" || true)
[ "${tagged:-$commit}" = "$commit" ] || fail "the tag v$version names another commit: choose the next version"
tests/package.sh
clean
[ -n "$tagged" ] || git tag -a "v$version" -m "rdma-reactor $version" "$commit"
# In the order in which they depend on each other: each is found in the registry by the next one.
cat <<EOF
v$version is tagged here, and nothing is uploaded. To publish it:
  git checkout v$version
  cargo publish -p rdma-transport
  cargo publish -p rdma-transport-embedded
  cargo publish -p rdma-transport-verbs
  cargo publish -p rdma-reactor
  git push $repository v$version
EOF
