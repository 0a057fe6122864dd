#!/usr/bin/env bash
# Prints the mirror of Debian's archive that apt uses, or DEBIAN_MIRROR.
echo "${DEBIAN_MIRROR:-$(awk '$1 == "URIs:" { print $2; exit } $1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /^http/) { print $i; exit } }' \
    /etc/apt/sources.list.d/*.sources /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null)}"
