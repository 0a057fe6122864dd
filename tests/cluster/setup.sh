#!/usr/bin/env bash
# Installs what is missing of Debian's packages for the engines, the checks of results, and the browser.
set -euo pipefail
packages="slurmctld slurmd slurm-client munge openmpi-bin mpich jq iproute2 curl chromium-headless-shell chromium-driver python3-venv"
missing=
for package in $packages; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' || missing+=" $package"
done
[ -z "$missing" ] && exit 0
echo "cluster: installing$missing" >&2
[ "$(id -u)" = 0 ] || { echo "cluster: this needs root: apt-get install$missing" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086
timeout 900 apt-get install -y -qq --no-install-recommends $missing >/dev/null
