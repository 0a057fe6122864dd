#!/usr/bin/env bash
# Installs the missing Debian packages for the engines, the checks of results, and the browser.
set -euo pipefail
exec "$(dirname "$0")/../packages.sh" slurmctld slurmd slurm-client munge openmpi-bin mpich jq iproute2 curl \
    chromium-headless-shell chromium-driver python3-venv
