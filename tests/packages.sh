#!/usr/bin/env bash
# Installs the Debian packages that are missing: packages.sh PACKAGE...
set -euo pipefail
missing=()
for package; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0
install=(apt-get -qq -y --no-install-recommends -o DPkg::Lock::Timeout=600 -o Dpkg::Use-Pty=0 install "${missing[@]}")
echo "packages.sh: installing ${missing[*]}" >&2
[ "$(id -u)" = 0 ] || { echo "packages.sh: this needs root: ${install[*]}" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
timeout 900 apt-get -qq -o DPkg::Lock::Timeout=600 update >&2
timeout 900 "${install[@]}" >/dev/null
