#!/usr/bin/env bash
# Installs what is missing of the Debian packages for the engines, the checks of results and the browser, and the validator of
# Kubernetes' manifests.
set -e
. "$(dirname "$0")/lib.sh"
tests/packages.sh slurmctld slurmd slurm-client munge openmpi-bin mpich jq iproute2 curl \
    chromium-headless-shell chromium-driver python3-venv
"$venv/bin/python" -c 'import kubernetes_validate, yaml' 2>/dev/null || {
    mkdir -p "${venv%/*}"
    python3 -m venv "$venv"
    timeout 900 "$venv/bin/pip" install -q kubernetes-validate pyyaml
}
