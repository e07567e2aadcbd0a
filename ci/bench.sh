#!/usr/bin/env bash
# Times every collective on 2 and 4 ranks: bench.sh [BIN], with BIN the folder of the commrt command.
set -euo pipefail

commrt=${1:+$1/}commrt
for ranks in 2 4; do
    for collective in all_reduce all_gather reduce_scatter broadcast reduce gather scatter all_to_all sendrecv; do
        "$commrt" bench "$collective" -n "$ranks" -b 8 -e 64M -f 16 --iters 50
    done
    "$commrt" bench barrier -n "$ranks" --iters 1000
done
