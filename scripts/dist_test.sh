#!/usr/bin/env bash
# Test on the GPUs of one machine, a process for each:
#     scripts/dist_test.sh 8 options/x.yml
# All that follows is passed on to basicsr/test.py. PORT is where the processes meet (4321); two runs
# on one machine need two.

set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: [PORT=4321] $0 GPUS OPTION_FILE [flags of basicsr/test.py ...]" >&2
    exit 2
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exec torchrun --nproc_per_node="$1" --master_port="${PORT:-4321}" \
    "$root/basicsr/test.py" -opt "$2" --launcher pytorch "${@:3}"
