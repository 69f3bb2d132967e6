#!/usr/bin/env bash
# Train on the GPUs of one machine, a process for each:
#     scripts/dist_train.sh 8 options/x.yml
# All that follows is passed on to basicsr/train.py. PORT is where the processes meet (4321); two runs
# on one machine need two.

set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: [PORT=4321] $0 GPUS OPTION_FILE [flags of basicsr/train.py ...]" >&2
    exit 2
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exec torchrun --nproc_per_node="$1" --master_port="${PORT:-4321}" \
    "$root/basicsr/train.py" -opt "$2" --launcher pytorch "${@:3}"
