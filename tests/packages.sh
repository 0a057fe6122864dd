#!/usr/bin/env bash
# Installs the Debian packages that are missing: packages.sh PACKAGE... With --update instead, fetches the lists of packages.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive

# apt-get waits for another process that installs, but not for one that fetches the lists.
update() {
    until timeout 900 apt-get -qq -o DPkg::Lock::Timeout=600 update >&2; do
        [ $SECONDS -lt 600 ] || { echo "packages.sh: the lists of packages cannot be fetched" >&2; exit 1; }
        sleep 5
    done
}

[ "$*" != --update ] || { update; exit; }
missing=()
for package; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0
install=(apt-get -qq -y --no-install-recommends -o DPkg::Lock::Timeout=600 -o Dpkg::Use-Pty=0 install "${missing[@]}")
echo "packages.sh: installing ${missing[*]}" >&2
[ "$(id -u)" = 0 ] || { echo "packages.sh: this needs root: ${install[*]}" >&2; exit 1; }
# A killed run may have left packages half installed, which blocks apt-get. Half-installed packages of a running process belong to that
# process: then this fails, and apt-get waits.
[ -z "$(dpkg --audit)" ] || dpkg --configure -a >&2 || true
update
timeout 3600 "${install[@]}" >/dev/null
